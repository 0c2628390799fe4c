"""Liveness apart from readiness: a hung step is found, a long step, a busy and an idle engine are left alone (F2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from pegainfer_core.messages import EngineStats, LoadProgress, StepOutputs
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_server.liveness import PATIENCE, Liveness
from pegainfer_server.probes import LIVE_PATHS, READY_PATHS

Serve = Callable[..., Awaitable[Any]]
TIMEOUT = 100.0
STEP = StepOutputs([], EngineStats(), 1)


class Engine(FakeEngineClient):
    """An engine whose open requests, device and processor time a test sets."""

    def __init__(self, device: str) -> None:
        super().__init__(msgspec.structs.replace(fake_info(10), device=device), auto=False)
        self.dispatch(self.engine_info)
        self.open = 0
        self.cpu: float | None = 0.0

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return self.open

    def cpu_seconds(self) -> float | None:
        """Processor time so far."""
        return self.cpu


class Watched:
    """A liveness with a clock that only the test moves; `cores` are used while it moves."""

    def __init__(self, device: str = "cpu") -> None:
        self.now = 1000.0
        self.engine = Engine(device)
        self.liveness = Liveness(self.engine, TIMEOUT, clock=lambda: self.now)

    def after(self, seconds: float, cores: float = 0.0) -> float | None:
        """What is said after looking every second for so long."""
        for _ in range(int(seconds)):
            self.now += 1.0
            if self.engine.cpu is not None:
                self.engine.cpu += cores
            said = self.liveness.stalled_for()
        return said


def test_f2_a_step_that_hangs_is_found_after_the_timeout() -> None:
    watched = Watched()
    watched.engine.open = 1
    assert watched.after(TIMEOUT) is None
    assert watched.after(2) == pytest.approx(TIMEOUT + 2)
    watched.engine.dispatch(STEP)
    assert watched.after(1) is None


def test_f2_idle_is_no_stall_and_the_time_counts_from_the_first_open_request() -> None:
    watched = Watched()
    assert watched.after(50 * TIMEOUT) is None
    watched.engine.open = 1
    assert watched.after(TIMEOUT - 1) is None
    assert watched.after(2) is not None


def test_f2_a_long_step_on_a_cpu_that_computes_is_no_stall_unless_it_never_ends() -> None:
    watched = Watched()
    watched.engine.open = 1
    assert watched.after((PATIENCE - 1) * TIMEOUT, cores=1.0) is None
    assert watched.after(2 * TIMEOUT, cores=1.0) is not None


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_f2_without_knowledge_of_processor_time_only_steps_count(device: str) -> None:
    """A GPU's host thread spins while it waits, so its processor time is no sign of progress."""
    watched = Watched(device)
    if device == "cpu":
        watched.engine.cpu = None
    watched.engine.open = 1
    assert watched.after(TIMEOUT + 1, cores=1.0) is not None


def test_f2_a_saturated_engine_that_makes_steps_is_alive() -> None:
    watched = Watched("cuda:0")
    watched.engine.open = 10_000
    for _ in range(10):
        assert watched.after(TIMEOUT - 1) is None
        watched.engine.dispatch(STEP)


def test_a_timeout_of_zero_never_calls_it_stalled() -> None:
    engine = Engine("cuda:0")
    engine.open = 1
    times = iter(range(0, 10**9, 10**6))
    liveness = Liveness(engine, 0.0, clock=lambda: float(next(times)))
    assert [liveness.stalled_for() for _ in range(5)] == [None] * 5


async def test_the_log_tells_when_a_stall_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine("cuda:0")
    engine.open = 3
    now = 0.0
    liveness = Liveness(engine, 1e-9, clock=lambda: now)
    watching = asyncio.create_task(liveness.watch())
    now = 60.0
    while not caplog.records:
        await asyncio.sleep(0)
    assert "not made a step for 60 s with 3 open requests" in caplog.text
    engine.dispatch(STEP)
    while len(caplog.records) < 2:
        await asyncio.sleep(0)
    assert "makes steps again" in caplog.text
    watching.cancel()


# the routes


async def probe(served: Any, path: str) -> tuple[int, str]:
    response = await served.http.get(path)
    assert (await served.http.head(path)).status_code == response.status_code
    return response.status_code, response.json()["status"]


async def test_f2_f18_probes_over_a_servers_life(serve: Serve) -> None:
    served = await serve(ready=False, tokenizer=None, api_keys=("key",))
    served.engine.dispatch(LoadProgress("weights", 3, 10))
    states: list[tuple[tuple[int, str], tuple[int, str]]] = [((503, "loading"), (200, "alive"))]

    async def check() -> None:
        ready, live = states[-1]
        for path in READY_PATHS:
            assert await probe(served, path) == ready
        for path in LIVE_PATHS:
            assert await probe(served, path) == live

    await check()
    await served.engine.start()
    served.state.tokenizer = served.tokenizer
    states.append(((200, "ok"), (200, "alive")))
    await check()
    served.state.draining = True
    states.append(((503, "draining"), (200, "alive")))
    await check()
    served.engine.died("killed")
    states.append(((503, "dead"), (503, "dead")))
    await check()


async def test_f2_a_hung_step_shows_in_both_probes(serve: Serve) -> None:
    served = await serve(auto=False, stall_timeout=0.001)
    sending = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
    while not served.engine.num_open:
        await asyncio.sleep(0)
    while (await probe(served, "/livez"))[0] == 200:
        pass
    assert await probe(served, "/livez") == (503, "stalled")
    assert await probe(served, "/health") == (503, "stalled")
    served.engine.step()
    assert (await sending).status_code == 200
    assert await probe(served, "/livez") == (200, "alive")
    assert await probe(served, "/health") == (200, "ok")
