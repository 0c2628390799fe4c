"""Throughput-latency curves from result files, as PNG and SVG.

Owns the pictures. A picture shows what one machine did; files of different machines are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pegainfer_core.errors import PegainferError

from pegainfer_server.bench.report import value_at

PANELS = (
    ("TTFT p50, ms", "ttft_ms.p50"),
    ("TTFT p99, ms", "ttft_ms.p99"),
    ("TPOT p50, ms", "tpot_ms.p50"),
    ("ITL p99, ms", "itl_ms.p99"),
)
FORMATS = ("png", "svg")
LINES = {"closed": "-", "open": "--"}

Curve = list[Mapping[str, Any]]


def read_points(files: Sequence[Path]) -> tuple[list[Mapping[str, Any]], str]:
    """All load points of some result files, and a caption. Raises PegainferError for a file of another kind or machine."""
    points: list[Mapping[str, Any]] = []
    captions: set[str] = set()
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            found = load_points(content)
            captions.add(caption(content["provenance"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise PegainferError(f"{file.name} is no result of load points: {error!r}") from error
        points += found
    if len(captions) > 1:
        raise PegainferError(f"these files are not of one machine and commit: {'; '.join(sorted(captions))}")
    if not points:
        raise PegainferError("the files hold no points")
    return points, captions.pop()


def load_points(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The load points of a result; of a comparison, those of both engines. Raises LookupError if it has none by its kind."""
    if content["kind"] == "peer comparison":
        return [point for engine in content["engines"].values() for point in load_points({"kind": "peer", **engine})]
    if content["kind"] == "peer":
        return [point for name in ("P1", "P2", "P3") for point in content["panels"][name]]
    points: list[Mapping[str, Any]] = content["points"]
    return points


def caption(provenance: Mapping[str, Any]) -> str:
    """Machine, driver and commit in one line."""
    gpus = provenance["gpus"]
    device = f"{gpus[0]['name']}, driver {gpus[0]['driver']}" if gpus else provenance["machine"].get("cpu", "CPU")
    commit = (provenance["commit"] or "unknown")[:10]
    return f"{device}, {provenance['date'][:10]}, commit {commit}{'+' if provenance['dirty'] else ''}"


def curves(points: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Points by engine, shape and mode, each in order of load."""
    found: dict[str, Curve] = {}
    for point in points:
        name = f"{point['engine']} {point['shape']}" + (", Poisson" if point["mode"] == "open" else "")
        found.setdefault(name, []).append(point)
    return {name: sorted(curve, key=lambda point: float(point["load"])) for name, curve in found.items()}


def draw(points: Sequence[Mapping[str, Any]], title: str, out: Path) -> list[Path]:
    """Write `out`.png and `out`.svg: latencies over output tokens a second, each point marked with its load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, (label, path) in zip(axes, PANELS, strict=True):
        for name, curve in curves(points).items():
            shown = [point for point in curve if value_at(point, path) is not None]
            x = [point["output_tokens_s"] for point in shown]
            y = [value_at(point, path) for point in shown]
            axis.plot(x, y, LINES[curve[0]["mode"]], marker="o", label=name)
            for point, left, height in zip(shown, x, y, strict=True):
                axis.annotate(
                    f"{point['load']:g}", (left, height), textcoords="offset points", xytext=(4, 4), fontsize=7
                )
        axis.margins(0.1)  # room for the marks' labels
        axis.set(xlabel="output tokens/s", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return save(figure, out)


def save(figure: Any, out: Path) -> list[Path]:
    """Write a figure in all formats, without dates, so that the same figures give the same files."""
    import matplotlib

    out.parent.mkdir(parents=True, exist_ok=True)
    files = {kind: out.with_name(f"{out.name}.{kind}") for kind in FORMATS}
    with matplotlib.rc_context({"svg.hashsalt": "pegainfer"}):
        for kind, file in files.items():
            figure.savefig(file, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return list(files.values())
