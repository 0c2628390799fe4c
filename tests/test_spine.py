"""The whole spine over HTTP, against transformers: a tiny Qwen3 and SmolLM2, cold, warm, crowded, chunked and preempted.

Numbers are teacher-forced: transformers scores the very tokens the server returned, so one differing token cannot hide others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pegainfer_core.testing.reference import transformers_logits
from pegainfer_core.testing.served import Served, served
from pegainfer_llama.smollm2 import ensure_checkpoint
from pegainfer_qwen3.testing import write_tiny_qwen3

NUM_OUTPUT = 24
LENGTHS = (1, 2, 15, 16, 17, 31, 48, 49, 64, 70, 90, 100, 33, 47, 80, 128)
MARGIN = 1e-3
"""Greedy choices must agree where the reference's best two are further apart than this, in nat."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checkpoint, prompts for it, and the pool (in bytes) that its 16 requests overflow."""

    path: Path
    vocab_size: int
    small_pool: int

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        rng = random.Random(7)
        shared = [rng.randrange(5, self.vocab_size) for _ in range(40)]
        return [(shared + [rng.randrange(5, self.vocab_size) for _ in range(n)])[-n:] for n in LENGTHS]


@pytest.fixture(scope="module", params=["qwen3", "qwen3-untied", "smollm2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "smollm2":
        token_bytes = 30 * 2 * 3 * 64 * 4
        return Subject(ensure_checkpoint(), 49_000, 420 * token_bytes)
    path = tmp_path_factory.mktemp("model")
    changes: dict[str, Any] = {}
    if request.param == "qwen3-untied":
        changes = {"tie_word_embeddings": False, "num_key_value_heads": 1}
    write_tiny_qwen3(path, shard_bytes=200_000, **changes)
    heads = changes.get("num_key_value_heads", 2)
    return Subject(path, 500, 420 * 4 * 2 * heads * 32 * 4)


@pytest.fixture(scope="module")
def reference(subject: Subject) -> Reference:
    return Reference(subject.path)


class Reference:
    """transformers' log-probabilities, remembered by token sequence."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def learn(self, sequences: list[list[int]]) -> None:
        """Score what is not known yet, in one load of the model."""
        new = [ids for ids in sequences if tuple(ids) not in self._known]
        for ids, logits in zip(new, transformers_logits(self._path, new) if new else [], strict=True):
            self._known[tuple(ids)] = logits.double().log_softmax(-1)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[tokens, V]."""
        return self._known[tuple(ids)]


async def complete(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "test", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = await client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def generate_all(url: str, prompts: list[list[int]], together: int) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(together)

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
        async with gate:
            return await complete(client, prompt, max_tokens=NUM_OUTPUT, logprobs=5)

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


async def echo_all(url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return [await complete(client, prompt, max_tokens=0, echo=True, logprobs=5) for prompt in prompts]


def check_generation(reference: Reference, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    """Mean |dlogprob| of the sampled tokens and their alternatives, and every greedy choice."""
    outputs = [answer["choices"][0]["token_ids"] for answer in answers]
    assert all(len(output) == NUM_OUTPUT for output in outputs)
    reference.learn([prompt + output for prompt, output in zip(prompts, outputs, strict=True)])
    differences: list[float] = []
    for prompt, output, answer in zip(prompts, outputs, answers, strict=True):
        expected = reference.logprobs(prompt + output)[len(prompt) - 1 : -1]
        logprobs = answer["choices"][0]["logprobs"]
        for row, token_id, value, top in zip(
            expected, output, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            differences.append(abs(float(row[token_id]) - value))
            best = row.topk(5).values.tolist()
            differences.extend(abs(a - b) for a, b in zip(best, sorted(top.values(), reverse=True)[:5], strict=False))
            assert best[0] - best[1] <= MARGIN or token_id == int(row.argmax())
    assert sum(differences) / len(differences) <= 1e-4


def check_echo(reference: Reference, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    reference.learn(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert values[0] is None and len(values) == len(prompt)
        expected = reference.logprobs(prompt)[range(len(prompt) - 1), prompt[1:]].tolist()
        if expected:
            assert sum(abs(a - b) for a, b in zip(values[1:], expected, strict=True)) / len(expected) <= 1e-4


async def gauge(url: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=url) as client:
        text = (await client.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


async def test_cold_warm_and_crowded_equal_transformers(subject: Subject, reference: Reference) -> None:
    """A21, A53."""
    prompts = subject.prompts
    with served(subject.path, "--dtype", "float32") as server:
        cold = await generate_all(server.url, prompts, together=1)
        check_generation(reference, prompts, cold)
        warm = await generate_all(server.url, prompts, together=1)
        assert cached(warm) == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        check_generation(reference, prompts, warm)
        check_echo(reference, prompts, await echo_all(server.url, prompts))
    with served(subject.path, "--dtype", "float32", "--no-prefix-cache") as server:
        crowded = await generate_all(server.url, prompts, together=16)
        check_generation(reference, prompts, crowded)
        assert cached(crowded) == [0] * len(prompts)


@pytest.mark.parametrize("run_ahead", [False, True])
async def test_chunked_and_preempted_equal_transformers(
    subject: Subject, reference: Reference, run_ahead: bool
) -> None:
    prompts = subject.prompts
    flags = ["--dtype", "float32", "--max-prefill-tokens", "32", "--kv-cache-memory", str(subject.small_pool)]
    with served(subject.path, *flags, *(["--run-ahead"] if run_ahead else [])) as server:
        for _ in range(2):
            check_generation(reference, prompts, await generate_all(server.url, prompts, together=16))
        check_echo(reference, prompts, await echo_all(server.url, prompts))
        assert await gauge(server.url, "num_preemptions_total") > 0
        assert await gauge(server.url, "kv_cache_usage_perc") == 0


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Served]:
    with served(write_tiny_qwen3(tmp_path)) as server:
        yield server


async def test_dropped_streams_leave_nothing_behind(tiny: Served) -> None:
    """A54."""
    body = {"model": "test", "prompt": [5, 6, 7], "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=tiny.url, timeout=300, limits=limits) as client:

        async def stream(index: int) -> int:
            """Tokens that even ones got by the end, by the stream's own account; odd ones hang up after two events."""
            fields = {"max_tokens": 20 if index % 2 == 0 else 3000, "seed": index}
            events: list[str] = []
            async with client.stream("POST", "/v1/completions", json=body | fields) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(line.removeprefix("data: "))
                    if index % 2 and len(events) == 2:
                        return -1
            return int(json.loads(events[-1])["usage"]["completion_tokens"])

        counts = await asyncio.gather(*(stream(index) for index in range(200)))
    assert counts == [20, -1] * 100
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        async with asyncio.timeout(20):
            while await gauge(tiny.url, name) != 0:
                await asyncio.sleep(0.01)


async def test_a_killed_engine_fails_streams_and_ends_the_server(tiny: Served) -> None:
    body = {"model": "test", "prompt": [5, 6, 7], "ignore_eos": True, "stream": True, "max_tokens": 3000}
    engine = tiny.engine_pid
    async with (
        httpx.AsyncClient(base_url=tiny.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        os.kill(engine, signal.SIGKILL)
        rest = [line async for line in lines if line]
    assert '"error"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert tiny.wait() == 1
    assert "SIGKILL" in tiny.log[-1]


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [10**9]}, 400, "1000000000"),
    ({"prompt": [-1]}, 400, "-1"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_k": -7}, 400, "top_k"),
    ({"n": 10**6}, 400, "n"),
    ({"logit_bias": {"99999999": 5}}, 400, "logit_bias"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"prompt": [5] * 4096}, 400, "4096"),
    ({"prompt": [5] * 4097}, 400, "4097"),
    ({"model": "other"}, 404, "other"),
    ({"no_such_field": 1}, 400, "no_such_field"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"logprobs": 21}, 400, "logprobs"),
]


async def test_bad_input_is_refused_clearly_and_harms_nobody(tiny: Served) -> None:
    """A25, A26, A27, F15."""
    good = {"model": "test", "prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=tiny.url, timeout=60) as client:
        alone = (await client.post("/v1/completions", json=good)).json()["choices"][0]["text"]

        async def canary() -> str:
            text: str = (await client.post("/v1/completions", json=good)).json()["choices"][0]["text"]
            return text

        canaries = [asyncio.create_task(canary()) for _ in range(4)]
        for fields, status, words in BAD:
            response = await client.post("/v1/completions", json=good | {"max_tokens": 5} | fields)
            assert response.status_code == status, (fields, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and words in error["message"], error
        for content in (b"{", b'{"prompt": [5], "temperature": NaN}', b"[]", b"\xff"):
            response = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400 and response.json()["error"]["message"]
        kept = await client.post("/v1/completions", json=good | {"top_k": 10**9, "temperature": 1, "seed": 1})
        assert kept.status_code == 200
        edge = await client.post("/v1/completions", json=good | {"prompt": [5] * 4095, "max_tokens": 1})
        assert edge.json()["choices"][0]["finish_reason"] == "length"
        canaries += [asyncio.create_task(canary())]
        assert set(await asyncio.gather(*canaries)) == {alone}
