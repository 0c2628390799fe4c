"""A profiler around some steps, written as a trace file.

Owns the choice of what is recorded. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

WARM_UP_STEPS = 4
"""Steps under a profiler that already runs but whose times are not kept: its first ones are slow."""


def trace_steps(step: Callable[[], object], count: int, file: Path) -> None:
    """Call `step` and write what the GPU did (the CPU where there is none) in `count` of the calls, in Chrome's format."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(
        activities=[activity],
        schedule=schedule(wait=0, warmup=WARM_UP_STEPS, active=count, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
    ) as profiler:
        for _ in range(WARM_UP_STEPS + count):
            step()
            profiler.step()
