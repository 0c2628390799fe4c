"""What a long prompt whose prefix is cached costs the host, by length: goal P4 without a GPU.

Two views. `parts`: the functions that touch every token of a prompt, in the order of the request's path, each timed alone in this process.
`served`: the time to the first token through `pegainfer serve` of a checkpoint so small that its own step hardly
counts, with the load client of `pegainfer bench`.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from pegainfer_core.batch import BatchBuilder, StepInputs, exact_shape
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.messages import TO_ENGINE_DECODER, TO_ENGINE_ENCODER, AddRequest, pack_ids
from pegainfer_core.plan import RowResult, StepResult
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.testing.fake_client import fake_info
from pegainfer_core.testing.tiny_tokenizer import tiny_tokenizer
from pegainfer_core.tokenizer import Tokenizer
from pegainfer_server.bench.client import Endpoint
from pegainfer_server.bench.prefix_bench import PREFIX_COLUMNS, run_prefix
from pegainfer_server.bench.provenance import provenance
from pegainfer_server.bench.report import document, finish, show
from pegainfer_server.bench.server_process import ServerProcess
from pegainfer_server.body import parse_body
from pegainfer_server.prompts import read_prompts
from pegainfer_server.protocol import CompletionBody
from random_checkpoint import write_checkpoint

LENGTHS = (1024, 4096, 16384)
MAX_MODEL_LEN = 18432
PAGE_SIZE = 16
TOKEN_IDS = range(1000, 32000)
VOCAB_SIZE = 151936
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 40960,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
T = TypeVar("T")


class Laps:
    """Times of named parts, collected over repetitions."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        """`work()`, timed."""
        begun = time.perf_counter()
        result = work()
        self._seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    def least_us(self) -> dict[str, float]:
        """Microseconds of each part at best, without the first repetition, which finds nothing cached."""
        return {name: round(min(seconds[1:]) * 1e6, 1) for name, seconds in self._seconds.items()}


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not wait for anything."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


def parts(length: int, repeats: int) -> dict[str, Any]:
    """The parts for one prompt, sent again and again; the least of the repetitions, as the machine may have other work."""
    ids = random.Random(length).choices(TOKEN_IDS, k=length)
    fields = {"prompt": ids, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "stream": True}
    raw = msgspec.json.encode(fields)
    info = fake_info(VOCAB_SIZE, [2], MAX_MODEL_LEN)
    tokenizer = Tokenizer(tiny_tokenizer(), {})
    limits = SchedulerLimits(
        max_model_len=MAX_MODEL_LEN,
        max_prefill_tokens=MAX_MODEL_LEN,
        max_running_requests=256,
        max_waiting_requests=256,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset([2]),
    )
    scheduler = Scheduler(limits, KVCache(50_000, PAGE_SIZE))
    builder = BatchBuilder(limits.max_running_requests, MAX_MODEL_LEN, PAGE_SIZE, torch.device("cpu"))
    laps = Laps()

    def fill(plan: Any) -> None:
        shape = exact_shape(plan)
        builder.fill(plan, shape, StepInputs(shape, torch.empty(StepInputs.num_words(shape), dtype=torch.int32)))

    for _ in range(repeats + 1):
        body = laps.time("API: JSON to body", lambda: parse_body(raw, CompletionBody))
        reading = read_prompts(body.prompt, tokenizer, info, most=1, add_special_tokens=True)
        (prompt,) = laps.time("API: check ids", lambda: at_once(reading))  # noqa: B023
        request = laps.time("API: request", lambda: AddRequest("x", pack_ids(prompt.ids), PARAMS))  # noqa: B023
        data = laps.time("API: encode", lambda: TO_ENGINE_ENCODER.encode(request))  # noqa: B023
        received = laps.time("engine: decode", lambda: TO_ENGINE_DECODER.decode(data))  # noqa: B023
        assert isinstance(received, AddRequest)
        laps.time("engine: add", lambda: scheduler.add(received))  # noqa: B023
        plan = laps.time("engine: plan", scheduler.plan)
        laps.time("engine: batch", lambda: fill(plan))  # noqa: B023
        for part in ("engine: commit", "engine: commit and end"):
            laps.time(part, lambda: scheduler.commit(StepResult(rows=[RowResult(token_id=5)])))
            scheduler.plan()
    us = laps.least_us()
    return {"input_tokens": length, "body_bytes": len(raw), "wire_bytes": len(data), "us": us} | {
        "total_us": round(sum(us.values()), 1)
    }


def served(lengths: list[int], prompts: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """First tokens of cached prompts from a real server."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        checkpoint = write_checkpoint(Path(folder) / "tiny", "qwen3-60m", **TINY)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        program = [sys.executable, "-c", "import sys; from pegainfer_server.cli import main; sys.exit(main())"]
        command = [*program, "serve", str(checkpoint), "--served-model-name", "tiny", "--port", str(port)]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--log-level", "warning"]
        endpoint = Endpoint("pegainfer", f"http://127.0.0.1:{port}", "tiny")
        with ServerProcess(command, endpoint.root) as server:
            server.wait_ready(60)
            return run_prefix([endpoint], lengths, TOKEN_IDS, num_prompts=prompts, warm=repeats, seed=seed)


def main() -> None:
    """Measure both, print and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each length that are sent to the server")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = [parts(length, arguments.repeats) for length in arguments.lengths]
    columns = [(name, f"us.{name}") for name in rows[0]["us"]]
    show("host parts, us", rows, [("prompt", "input_tokens"), *columns, ("total", "total_us")])
    answers = served(arguments.lengths, arguments.prompts, arguments.repeats, arguments.seed)
    show("first token through a server of a tiny model", answers, PREFIX_COLUMNS)
    facts = provenance("prompt_host", vars(arguments))
    finish(document("prompt host", facts, parts=rows, served=answers), arguments.out)


if __name__ == "__main__":
    main()
