"""Both implementations of EngineClient against the same expectations: a thread with a fake runner, a process with a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from pegainfer_core.client import EngineClient
from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import DeviceLostError, Engine
from pegainfer_core.engine_loop import run_engine
from pegainfer_core.errors import EngineDeadError
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.messages import (
    TO_ENGINE_DECODER,
    TO_ENGINE_ENCODER,
    AbortRequests,
    AddRequest,
    EngineInfo,
    FromEngine,
    LoadProgress,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
    pack_ids,
)
from pegainfer_core.plan import StepPlan
from pegainfer_core.process_client import ProcessClient
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.testing.fake_runner import VOCAB_SIZE, FakeRunner, expected_output
from pegainfer_core.thread_client import ThreadClient
from pegainfer_qwen3.testing import write_tiny_qwen3

PROMPT = [100, 101, 102]


def fake_start(fail_when: Callable[[StepPlan], None] | None = None) -> Callable[..., tuple[Engine, EngineInfo]]:
    def start(on_progress: Callable[[LoadProgress], None]) -> tuple[Engine, EngineInfo]:
        limits = SchedulerLimits(
            max_model_len=19_000,
            max_prefill_tokens=16,
            max_running_requests=4,
            max_waiting_requests=100,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
        )
        on_progress(LoadProgress("weights", 1, 1))
        engine = Engine(Scheduler(limits, KVCache(5000, 4)), FakeRunner(5000, 4, fail_when))
        info = EngineInfo("fake", "cpu", "float32", "torch", 19_000, 16, 4, 4, 4999, VOCAB_SIZE, [], 0, 0, 0, 0, [])
        return engine, info

    return start


@pytest.fixture(params=["thread", "process"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineClient]:
    made: EngineClient
    if request.param == "thread":
        made = ThreadClient(fake_start())
    else:
        made = ProcessClient(EngineConfig(model=str(write_tiny_qwen3(tmp_path)), max_running_requests=4))
    await made.start()
    yield made
    await made.close()


async def collect(client: EngineClient, request: AddRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(request)]


def endless(request_id: str) -> AddRequest:
    return AddRequest(request_id, PROMPT, SamplingParams(ignore_eos=True, temperature=0.0))


def test_ids_cross_the_wire_packed_or_not() -> None:
    ids = [0, 1, 151_935, 2**32 - 1]
    for sent in (ids, pack_ids(ids)):
        request = AddRequest("a", sent, SamplingParams(seed=3), "salt", -1)
        got = TO_ENGINE_DECODER.decode(TO_ENGINE_ENCODER.encode(request))
        assert got == AddRequest("a", pack_ids(ids), SamplingParams(seed=3), "salt", -1)
    sizes = [
        len(TO_ENGINE_ENCODER.encode(AddRequest("a", pack_ids([100_000] * count), SamplingParams())))
        for count in (1000, 2000)
    ]
    assert sizes[1] - sizes[0] == 4 * 1000
    with pytest.raises(OverflowError):
        pack_ids([-1])


async def test_it_loads_serves_many_and_goes_idle(client: EngineClient) -> None:
    info = await client.wait_ready()
    assert client.state == "ready" and client.progress is not None
    assert info.num_pages == client.stats.num_pages or client.stats.num_pages == 0
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    runs = await asyncio.gather(*(collect(client, AddRequest(str(i), PROMPT, params)) for i in range(9)))
    answers = [[token_id for output in outputs for token_id in output.token_ids] for outputs in runs]
    assert all(answer == answers[0] and len(answer) == 6 for answer in answers)
    assert [outputs[-1].finish_reason for outputs in runs] == ["length"] * 9
    assert (client.stats.num_running, client.stats.num_waiting, client.stats.kv_usage) == (0, 0, 0.0)
    assert client.stats.generation_tokens == 54 and client.num_open == 0


async def test_leaving_a_stream_gives_everything_back(client: EngineClient) -> None:
    await client.wait_ready()

    async def leave_after_two(request_id: str) -> None:
        outputs = client.generate(endless(request_id))
        await anext(outputs)
        await anext(outputs)
        await outputs.aclose()

    idle = asyncio.Event()
    client.on_step.append(lambda step: idle.set() if step.stats.num_running == 0 else None)
    await asyncio.gather(*(leave_after_two(str(i)) for i in range(3)))
    await asyncio.wait_for(idle.wait(), 30)
    assert (client.stats.num_running, client.stats.num_waiting, client.stats.kv_usage) == (0, 0, 0.0)


async def test_refusals_come_as_ends(client: EngineClient) -> None:
    await client.wait_ready()
    (output,) = await collect(client, AddRequest("bad", [10**6], SamplingParams()))
    assert output.finish_reason == "rejected" and "1000000" in (output.error or "")


async def test_closing_fails_what_is_open(client: EngineClient) -> None:
    await client.wait_ready()
    outputs = client.generate(endless("open"))
    await anext(outputs)
    await client.close()
    assert client.state == "closed"
    with pytest.raises(EngineDeadError):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError):
        await anext(client.generate(endless("late")))


async def test_a_failed_start_says_why() -> None:
    client = ProcessClient(EngineConfig(model="no/such/dir"))
    await client.start()
    with pytest.raises(EngineDeadError, match="no such directory"):
        await client.wait_ready()
    assert client.state == "dead"
    await client.close()


async def test_a_lost_device_ends_the_engine_with_its_words() -> None:
    def fail(plan: StepPlan) -> None:
        raise DeviceLostError("the card fell off the bus")

    client = ThreadClient(fake_start(fail))
    await client.start()
    await client.wait_ready()
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        await collect(client, endless("a"))
    assert client.state == "dead" and "fell off the bus" in await client.wait_dead()
    await client.close()


async def test_a_killed_engine_process_fails_every_open_request(tmp_path: Path) -> None:
    client = ProcessClient(EngineConfig(model=str(write_tiny_qwen3(tmp_path))))
    await client.start()
    await client.wait_ready()
    streams = [client.generate(endless(str(i))) for i in range(3)]
    for stream in streams:
        await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
    assert client.state == "dead"
    await client.close()


PARENT = """
import asyncio, sys
from pegainfer_core.config import EngineConfig
from pegainfer_core.process_client import ProcessClient

async def main():
    client = ProcessClient(EngineConfig(model=sys.argv[1]))
    await client.start()
    await client.wait_ready()
    sys.stdout.write(f"{client.pid}\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_orphan_survives_its_parents_sigkill(tmp_path: Path) -> None:
    model = write_tiny_qwen3(tmp_path)
    command = [sys.executable, "-c", PARENT, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        # The child inherited the write end of this pipe: it reads as closed only when both processes are gone.
        parent.kill()
        assert parent.stdout.read() == ""


def test_a_thread_client_gives_the_fake_runners_tokens() -> None:
    async def run() -> list[int]:
        client = ThreadClient(fake_start())
        await client.start()
        await client.wait_ready()
        request = AddRequest("a", PROMPT, SamplingParams(max_tokens=8, seed=5))
        tokens = [token_id for output in await collect(client, request) for token_id in output.token_ids]
        await client.close()
        return tokens

    assert asyncio.run(run()) == expected_output(PROMPT, 5, 8, frozenset())


class ScriptedChannel:
    """Hands over one list of messages for each wait, and remembers for which of its calls the engine would have slept."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self._batches = list(batches)
        self.waits: list[bool] = []
        self.sent: list[FromEngine] = []

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """See Channel."""
        self.waits.append(wait)
        return self._batches.pop(0) if wait else []

    def send(self, message: FromEngine) -> None:
        """See Channel."""
        self.sent.append(message)


def test_an_idle_engine_sleeps_until_a_message_comes() -> None:
    """F16: it looks at its inbox without waiting only while it has work."""
    request = AddRequest("a", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    channel = ScriptedChannel([request], [AbortRequests(["unknown"])], [Shutdown()])
    assert run_engine(fake_start(), channel, prepare_when_idle=False)
    steps = [message for message in channel.sent if isinstance(message, StepOutputs)]
    assert sum(len(output.token_ids) for step in steps for output in step.outputs) == 3
    idle = [index for index, wait in enumerate(channel.waits) if wait]
    assert idle[0] == 0
    assert idle[-2:] == [len(channel.waits) - 2, len(channel.waits) - 1], "after the last token it only sleeps"
    assert len(idle) == 3
