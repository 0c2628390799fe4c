"""How long a GPU worked and idled, read from a profiler's trace.

Owns the arithmetic on intervals. Short gaps lie between kernels that follow each other on the device; long ones are the
device waiting for the host.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LONG_GAP_US = 10.0


def device_gaps(trace: Path) -> dict[str, Any] | None:
    """Times of a trace in Chrome's format, as torch.profiler writes it; None if it has no work of a GPU.

    `busy_us`: at least one kernel or copy ran. `idle_us`: sum of gaps of at least LONG_GAP_US. `idle_share`: of the whole span.
    """
    data = trace.read_bytes()
    events = json.loads(gzip.decompress(data) if trace.suffix == ".gz" else data)["traceEvents"]
    work = [event for event in events if event.get("cat") in DEVICE_CATEGORIES and event.get("ph") == "X"]
    if not work:
        return None
    spans = merged((event["ts"], event["ts"] + event["dur"]) for event in work)
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
    span = spans[-1][1] - spans[0][0]
    idle = sum(gap for gap in gaps if gap >= LONG_GAP_US)
    return {
        "span_us": round(span, 1),
        "busy_us": round(sum(end - begin for begin, end in spans), 1),
        "idle_us": round(idle, 1),
        "idle_share": round(idle / span, 4) if span else 0.0,
        "long_gaps": sum(gap >= LONG_GAP_US for gap in gaps),
        "short_gaps_us": round(sum(gaps) - idle, 1),
        "launches": len(work),
    }


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union as disjoint intervals in order."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union
