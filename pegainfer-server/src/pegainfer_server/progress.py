"""What a user sees while a model loads, and the line that says it is ready.

Owns the progress bar (on a terminal) or one log line for each phase (elsewhere). Only reads the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from pegainfer_core.client import EngineClient
from pegainfer_core.messages import EngineInfo, LoadProgress

log = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between two looks at the client
LOG_INTERVAL = 5.0
"""Seconds of a phase between two lines where there is no terminal."""
SHOWN_SECONDS = 0.05


async def show_progress(client: EngineClient, bars: bool = True) -> None:
    """Show the phases of the start until the task is cancelled or the client leaves the loading state; `bars` on a terminal."""
    if bars and sys.stderr.isatty():
        await _draw(client)
    else:
        await _log_phases(client)


async def _log_phases(client: EngineClient) -> None:
    """A line when a phase begins, and one whenever it went on for another while."""
    phase, begun, told = "", 0.0, 0.0
    while client.state == "loading":
        now = time.monotonic()
        report = client.progress
        if report is not None and report.phase != phase:
            phase, begun, told = report.phase, now, now
            log.info("loading: %s", phase)
        elif report is not None and now - told >= LOG_INTERVAL:
            told = now
            log.info("loading: %s, %s after %.0f s", phase, how_far(report), now - begun)
        await asyncio.sleep(INTERVAL)


def how_far(report: LoadProgress) -> str:
    """How much of a phase is done, in words."""
    return f"{100 * report.done // report.total} %" if report.total else "still going on"


async def _draw(client: EngineClient) -> None:
    with _bars() as show:
        shown: LoadProgress | None = None
        while client.state == "loading":
            if client.progress is not None and client.progress != shown:
                shown = client.progress
                show(shown)
            await asyncio.sleep(INTERVAL)


@contextlib.contextmanager
def showing_progress(lines: bool = True) -> Iterator[Callable[[LoadProgress], None]]:
    """For commands that load a model in this process: a function to call with each report.

    Where there is no terminal it writes a line for each phase, if `lines`.
    """
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
        return
    phase = ""

    def tell(report: LoadProgress) -> None:
        nonlocal phase
        if lines and report.phase != phase:
            phase = report.phase
            sys.stderr.write(f"{phase}\n")

    yield tell


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[LoadProgress], None]]:
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
        task, phase = bars.add_task("starting", total=None), ""

        def show(report: LoadProgress) -> None:
            nonlocal task, phase
            if report.phase != phase:  # a new bar, because a total cannot become unknown again
                bars.remove_task(task)
                task, phase = bars.add_task(report.phase, total=report.total or None), report.phase
            # an unknown total: how many are done goes into the text
            count = f" {report.done}" if report.done and not report.total else ""
            bars.update(task, description=report.phase + count, completed=report.done)

        yield show


def describe(info: EngineInfo) -> str:
    """The engine's facts in one line."""
    pages = f"{info.num_pages} pages of {info.page_size} tokens"
    return f"{info.family} in {info.dtype} on {info.device} ({info.attention_backend}), context {info.max_model_len}, {pages}"


def timeline(seconds: float, phases: Sequence[tuple[str, float]]) -> str:
    """The start in one line: "import 2.1 s, weights 0.9 s, ready 3.4 s". Phases too short to show are left out."""
    shown = [(phase, length) for phase, length in phases if length >= SHOWN_SECONDS]
    return ", ".join(f"{phase} {length:.1f} s" for phase, length in [*shown, ("ready", seconds)])
