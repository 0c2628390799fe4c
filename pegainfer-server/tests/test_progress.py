"""What is told about a start: phases while it lasts, one line at its end."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest
from pegainfer_core.messages import LoadProgress
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_server import progress
from pegainfer_server.progress import how_far, show_progress, timeline


def test_the_timeline_is_one_line() -> None:
    phases = [("import", 2.06), ("weights", 0.94), ("KV cache", 0.01), ("graphs", 1.8)]
    assert timeline(5.44, phases) == "import 2.1 s, weights 0.9 s, graphs 1.8 s, ready 5.4 s"
    assert timeline(0.3, []) == "ready 0.3 s"


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (LoadProgress("weights", 0, 3), "0 %"),
        (LoadProgress("weights", 2, 3), "66 %"),
        (LoadProgress("weights", 3, 3), "100 %"),
        (LoadProgress("kernels", 0, 0), "still going on"),
    ],
)
def test_how_far(report: LoadProgress, text: str) -> None:
    assert how_far(report) == text


async def test_phases_are_logged_once_and_again_when_they_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)  # look whenever the loop turns
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    client = FakeEngineClient(fake_info(10), auto=False)
    caplog.set_level(logging.INFO)

    async def report(phase: str, done: int, total: int, at: float) -> None:
        clock[0] = at
        client.dispatch(LoadProgress(phase, done, total))
        for _ in range(5):
            await asyncio.sleep(0)

    showing = asyncio.create_task(show_progress(client))
    await report("weights", 0, 8, 100.0)
    await report("weights", 1, 8, 101.0)
    await report("weights", 4, 8, 106.0)
    await report("weights", 6, 8, 110.0)
    await report("kernels", 0, 0, 110.5)
    await report("kernels", 0, 0, 116.0)
    client.dispatch(fake_info(10))
    await showing
    assert [record.message for record in caplog.records] == [
        "loading: weights",
        "loading: weights, 50 % after 6 s",
        "loading: kernels",
        "loading: kernels, still going on after 6 s",
    ]


def test_on_a_terminal_a_bar_shows_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.showing_progress() as show:
        for report in (
            LoadProgress("weights", 1, 4),
            LoadProgress("weights", 4, 4),
            LoadProgress("kernels", 0, 0),
            LoadProgress("more graphs", 7, 0),
        ):
            show(report)
    assert (
        "more graphs 7" in terminal.getvalue()
    )  # what is drawn before depends on the refresh; the last state always is
