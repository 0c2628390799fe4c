"""Two results of peer_h200.py side by side: ratios, the goals, and whether the two may be compared at all.

Owns the table of goals. Reads files only; needs neither a GPU nor an engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pegainfer_core.errors import PegainferError
from pegainfer_server.bench.report import document, finish, show, value_at

SAME = (
    "schema",
    "kind",
    "workload",
    "provenance.commit",
    "provenance.dirty",
    "provenance.machine",
    "provenance.gpus",
    "provenance.python",
    "provenance.versions",
)
"""What both files must agree on."""
COLUMNS = (
    ("goal", "goal"),
    ("what", "what"),
    ("pegainfer", "ours"),
    ("vLLM", "peer"),
    ("ratio", "ratio"),
    ("wanted", "wanted"),
    ("reached", "reached"),
)
PREFIX_GOALS = {1024: 0.5, 4096: 0.4, 16384: 0.28}
READY_GOALS = {"cold": 10.0, "warm": 6.0}
MEMORY_GOAL_MIB = 1.5e9 / 2**20
IDLE_GOAL = 0.03

File = Mapping[str, Any]
Row = dict[str, Any]


def check_same(ours: File, peer: File) -> None:
    """Raise PegainferError naming the first thing in which the two runs differ."""
    for path in SAME:
        if value_at(ours, path) != value_at(peer, path):
            raise PegainferError(
                f"these results cannot be compared: {path} is {value_at(ours, path)!r} in one and {value_at(peer, path)!r} in the other"
            )


def compare(ours: File, peer: File) -> list[Row]:
    """A row for each goal and point."""
    check_same(ours, peer)
    mine, theirs = ours["panels"], peer["panels"]
    return [
        *_loads(mine, theirs),
        *_prefix(mine, theirs),
        *_starts(mine, theirs),
        *_memory(mine, theirs),
        *_steps(mine),
    ]


def failures(files: Mapping[str, File]) -> list[str]:
    """Requests that failed, by engine."""
    return [
        f"{name}, {panel}, {row['label']}: {row['failed']} requests failed"
        for name, file in files.items()
        for panel in ("P1", "P2", "P3", "P10")
        for row in file["panels"].get(panel, [])
        if row["failed"]
    ]


def _loads(mine: File, theirs: File) -> Iterator[Row]:
    for a, b in _pairs("P10", mine, theirs):
        yield _ratio("P10", f"{a['shape']}, {a['label']}: output tok/s", a, b, "output_tokens_s", 1.0, _at_least)
        yield _ratio("P10", f"{a['shape']}, {a['label']}: ITL p99 ms", a, b, "itl_ms.p99", 1.0, _at_most)
    for a, b in _pairs("P1", mine, theirs):
        yield _ratio("P1", f"{a['shape']}, 1 stream: TPOT p50 ms", a, b, "tpot_ms.p50", 0.68, _at_most)
    for a, b in _pairs("P2", mine, theirs):
        yield _ratio("P2", f"{a['shape']}, {a['label']}: output tok/s", a, b, "output_tokens_s", 1.25, _at_least)
        yield _ratio("P2", f"{a['shape']}, {a['label']}: ITL p99 ms", a, b, "itl_ms.p99", 1.0, _at_most)
    for a, b in _pairs("P3", mine, theirs):
        yield _ratio("P3", f"{a['shape']}, {a['label']}: TTFT p50 ms", a, b, "ttft_ms.p50", 0.7, _at_most)
        yield _ratio("P3", f"{a['shape']}, {a['label']}: TPOT p50 ms", a, b, "tpot_ms.p50", 0.7, _at_most)


def _pairs(panel: str, mine: File, theirs: File) -> Iterator[tuple[File, File]]:
    """The points of a panel that this workload has."""
    return zip(mine.get(panel, []), theirs.get(panel, []), strict=True)


def _prefix(mine: File, theirs: File) -> Iterator[Row]:
    for a, b in zip(mine["P4"], theirs["P4"], strict=True):
        goal = PREFIX_GOALS.get(a["input_tokens"], 0.5)
        yield _ratio("P4", f"warm prefix of {a['input_tokens']}: TTFT p50 ms", a, b, "warm_ttft_ms.p50", goal, _at_most)


def _starts(mine: File, theirs: File) -> Iterator[Row]:
    best = min(start["ready_s"] for start in theirs["P5"])
    for start in mine["P5"]:
        what = f"{start['start']} start, {start['page_cache']} page cache: ready s"
        yield _absolute("P5", what, start["ready_s"], best, READY_GOALS[start["page_cache"]])


def _memory(mine: File, theirs: File) -> Iterator[Row]:
    for when in ("idle", "loaded"):
        a, b = mine["P6"][when]["rss_mib"], theirs["P6"][when]["rss_mib"]
        yield _absolute("P6", f"RSS of all processes, {when}: MiB", a, b, round(MEMORY_GOAL_MIB))


def _steps(mine: File) -> Iterator[Row]:
    for row in (mine.get("P7") or {"steps": []})["steps"]:
        idle = value_at(row, "gpu.idle_share")
        if idle is not None:
            yield _absolute("P7", f"GPU idle share at batch {row['rows']}", idle, None, IDLE_GOAL)


def _at_most(value: float, goal: float) -> bool:
    return value <= goal


def _at_least(value: float, goal: float) -> bool:
    return value >= goal


def _ratio(
    goal: str, what: str, ours: File, peer: File, path: str, limit: float, reached: Callable[[float, float], bool]
) -> Row:
    a, b = value_at(ours, path), value_at(peer, path)
    ratio = None if a is None or not b else round(a / b, 4)
    sign = ">=" if reached is _at_least else "<="
    return {
        "goal": goal,
        "what": what,
        "ours": a,
        "peer": b,
        "ratio": ratio,
        "wanted": f"{sign} {limit:g}x",
        "reached": None if ratio is None else _yes(reached(ratio, limit)),
    }


def _absolute(goal: str, what: str, ours: float, peer: float | None, limit: float) -> Row:
    ratio = round(ours / peer, 4) if peer else None
    reached = _yes(ours <= limit)
    return {
        "goal": goal,
        "what": what,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "wanted": f"<= {limit:g}",
        "reached": reached,
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def markdown(rows: list[Row]) -> str:
    """The table of goals as a README has it."""
    lines = ["| " + " | ".join(heading for heading, _ in COLUMNS) + " |", "|---|---|---:|---:|---:|---|---|"]
    for row in rows:
        cells = (
            "-" if row[key] is None else f"{row[key]:g}" if isinstance(row[key], float) else str(row[key])
            for _, key in COLUMNS
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `compare`."""
    parser.add_argument("ours", type=Path)
    parser.add_argument("peer", type=Path)
    parser.add_argument("--markdown", action="store_true", help="end with the table as Markdown")
    parser.add_argument("--out", type=Path, help="JSON file to write: both results and their ratios")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, write; 1 if that makes no sense or a request failed."""
    try:
        ours, peer = (json.loads(file.read_text(encoding="utf-8")) for file in (arguments.ours, arguments.peer))
        rows = compare(ours, peer)
    except (PegainferError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    notes = failures({"pegainfer": ours, "vllm": peer})
    engines = {
        "pegainfer": {name: ours[name] for name in ("engine", "panels")},
        "vllm": {name: peer[name] for name in ("engine", "panels")},
    }
    content = document(
        "peer comparison",
        ours["provenance"],
        workload=ours["workload"],
        ratios=rows,
        peer_date=value_at(peer, "provenance.date"),
        engines=engines,
    )
    finish(content, arguments.out, notes)
    show("pegainfer and vLLM", rows, COLUMNS)
    if arguments.markdown:
        print(markdown(rows))
    return int(bool(notes))
