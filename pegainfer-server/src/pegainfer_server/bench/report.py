"""Results: the figures of a point, the file, the table, and the last line.

Owns the layout of result files (docs/benchmarks.md describes it). Every run writes one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pegainfer_server.bench.load import LoadResult
from pegainfer_server.bench.provenance import SCHEMA
from pegainfer_server.bench.records import RequestRecord
from pegainfer_server.bench.samples import summarize
from pegainfer_server.bench.workload import Point

BUSY_CLIENT = 0.8
"""A client that uses more of a CPU than this may be what limits the result."""

Columns = Sequence[tuple[str, str]]
"""(heading, path of keys with dots)."""

LOAD_COLUMNS: Columns = (
    ("engine", "engine"),
    ("in/out", "shape"),
    ("load", "label"),
    ("done", "completed"),
    ("failed", "failed"),
    ("tok/s", "output_tokens_s"),
    ("req/s", "requests_s"),
    ("TTFT p50", "ttft_ms.p50"),
    ("p99", "ttft_ms.p99"),
    ("TPOT p50", "tpot_ms.p50"),
    ("p99", "tpot_ms.p99"),
    ("ITL p99", "itl_ms.p99"),
    ("client CPU", "client.cpu"),
)


def load_figures(engine: str, point: Point, result: LoadResult, *, keep_itl: bool = False) -> dict[str, Any]:
    """One point of one engine: rates over the time from the first request to the last answer, and summaries in ms."""
    good = [record for record in result.records if record.error is None]
    seconds = max((record.ended for record in result.records), default=result.started) - result.started
    tokens = sum(record.output_tokens for record in good)
    tpots = [record.tpot for record in good]
    figures: dict[str, Any] = {
        "engine": engine,
        **point.as_json(),
        "label": point.label,
        "shape": f"{point.input_tokens}/{point.output_tokens}",
        "completed": len(good),
        "failed": len(result.records) - len(good),
        "errors": error_counts(result.records),
        "seconds": round(seconds, 4),
        "output_tokens_s": _rate(tokens, seconds),
        "total_tokens_s": _rate(tokens + sum(record.prompt_tokens for record in good), seconds),
        "requests_s": _rate(len(good), seconds),
        "ttft_ms": summarize([record.ttft for record in good]),
        "tpot_ms": summarize([tpot for tpot in tpots if tpot is not None]),
        "itl_ms": summarize([gap for record in good for gap in record.itl]),
        "e2e_ms": summarize([record.e2e for record in good]),
        "tokens": {
            "prompt": sum(record.prompt_tokens for record in good),
            "output": tokens,
            "cached": _cached(good),
            "events": sum(len(record.token_times) for record in good),
        },
        "client": {"cpu": round(result.client_cpu, 4), "lag_ms": summarize(result.client_lag)},
        "requests": request_columns(good, result.started, keep_itl=keep_itl),
    }
    return figures


def error_counts(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How often each kind of error came; errors that differ in numbers only are one kind, shown by its first."""
    return kinds_of([record.error for record in records if record.error is not None])


def kinds_of(errors: Sequence[str]) -> dict[str, int]:
    """The same for texts."""
    kinds: dict[str, list[str]] = {}
    for error in errors:
        kinds.setdefault(re.sub(r"\d+", "#", error), []).append(error)
    return {found[0]: len(found) for found in kinds.values()}


def request_columns(records: Sequence[RequestRecord], started: float, *, keep_itl: bool) -> dict[str, list[Any]]:
    """Every finished request, in the order of sending, one list for each quantity."""
    ordered = sorted(records, key=lambda record: record.sent)
    columns: dict[str, list[Any]] = {
        "sent_s": [round(record.sent - started, 4) for record in ordered],
        "ttft_ms": [round(record.ttft * 1e3, 3) for record in ordered],
        "tpot_ms": [None if record.tpot is None else round(record.tpot * 1e3, 4) for record in ordered],
        "e2e_ms": [round(record.e2e * 1e3, 3) for record in ordered],
    }
    if keep_itl:
        columns["itl_ms"] = [[round(gap * 1e3, 3) for gap in record.itl] for record in ordered]
    return columns


def document(kind: str, provenance: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """A result file's content."""
    return {"schema": SCHEMA, "kind": kind, "provenance": dict(provenance), **parts}


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a result file; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(pretty(content) + "\n", encoding="utf-8")


def pretty(value: Any, depth: int = 0) -> str:
    """JSON that people can read and diff: objects over several lines, lists of plain values on one."""
    pad, inner = " " * depth, " " * (depth + 1)
    if isinstance(value, Mapping) and value and depth < 4:
        items = (f"{inner}{json.dumps(str(name))}: {pretty(item, depth + 1)}" for name, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "[\n" + ",\n".join(inner + pretty(item, depth + 1) for item in value) + f"\n{pad}]"
    return json.dumps(value)


def last_line(content: Mapping[str, Any]) -> str:
    """The result in one line: everything but the single requests."""
    return json.dumps(_without(content, "requests"), separators=(",", ":"))


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Columns) -> None:
    """Print a table on stderr, so that stdout is left to the JSON line."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value_at(row, path)) for _, path in columns))
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=160)
    console.print(table)


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes figures of loads doubtful: failures, and a client that was too busy."""
    found = []
    for row in rows:
        name = f"{row['engine']}, {row['shape']}, {row['label']}"
        found += [f"{name}: {count} failed: {error}" for error, count in row["errors"].items()]
        if row["client"]["cpu"] > BUSY_CLIENT:
            found.append(f"{name}: the client used {row['client']['cpu']:.0%} of a CPU; use more --workers")
    return found


def finish(content: Mapping[str, Any], out: Path | None, notes: Sequence[str] = ()) -> None:
    """Write the file if there is one to write, print notes, and the last line on stdout."""
    if out is not None:
        write(out, content)
    for note in notes:
        sys.stderr.write(f"warning: {note}\n")
    sys.stdout.write(last_line(content) + "\n")
    sys.stdout.flush()


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where a part is missing."""
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _cached(records: Sequence[RequestRecord]) -> int | None:
    known = [record.cached_tokens for record in records if record.cached_tokens is not None]
    return sum(known) if known else None


def _without(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, name) for key, item in value.items() if key != name}
    if isinstance(value, list | tuple):
        return [_without(item, name) for item in value]
    return value
