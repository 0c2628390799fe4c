"""What a user sees while a model loads, and the line that says it is ready.

Owns the progress bar (on a terminal) or one log line for each phase (elsewhere). Only reads the client.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from pegainfer_core.client import EngineClient
from pegainfer_core.messages import EngineInfo, LoadProgress

log = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between two looks at the client


async def show_progress(client: EngineClient) -> None:
    """Show the phases of the start until the task is cancelled or the client leaves the loading state."""
    if sys.stderr.isatty():
        await _draw(client)
    else:
        await _log_phases(client)


async def _log_phases(client: EngineClient) -> None:
    phase = ""
    while client.state == "loading":
        if client.progress is not None and client.progress.phase != phase:
            phase = client.progress.phase
            log.info("loading: %s", phase)
        await asyncio.sleep(INTERVAL)


async def _draw(client: EngineClient) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None)
        shown: LoadProgress | None = None
        while client.state == "loading":
            if client.progress is not None and client.progress != shown:
                shown = client.progress
                bars.update(task, description=shown.phase, completed=shown.done, total=shown.total or None)
            await asyncio.sleep(INTERVAL)


def describe(info: EngineInfo) -> str:
    """The engine's facts in one line."""
    pages = f"{info.num_pages} pages of {info.page_size} tokens"
    return f"{info.family} in {info.dtype} on {info.device} ({info.attention_backend}), context {info.max_model_len}, {pages}"


def timeline(seconds: float, phases: Sequence[tuple[str, float]]) -> str:
    """The start in one line: "ready in 3.1 s (import 1.2, weights 0.9)"."""
    parts = ", ".join(f"{phase} {length:.1f}" for phase, length in phases)
    return f"ready in {seconds:.1f} s" + (f" ({parts})" if parts else "")
