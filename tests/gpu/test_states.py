"""Recurrent states on a GPU: captured steps, run-ahead, few slots, snapshots and preemption give what a plain engine gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core.llm import LLM, Completion
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.testing.paged_model import plan_of
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_core.testing.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from pegainfer_qwen35.family import Qwen35Family
from pegainfer_qwen35.testing import tiny_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
CLEAR_MARGIN = 1e-3
PLAIN: dict[str, Any] = {"run_ahead": False, "cuda_graphs": False, "fused_ops": False, "prefix_cache": False}
"""Kernel by kernel, step after step, nothing reused."""
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 130, 700)

Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("qwen35"), Qwen35Family(), tiny_config())


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    """Start an LLM in float32; it is closed after the test."""
    started: list[LLM] = []

    def start_llm(**settings: Any) -> LLM:
        chosen: dict[str, Any] = {
            "device": DEVICE,
            "dtype": "float32",
            "max_model_len": 1024,
            "kv_cache_memory": 1 << 28,
        }
        llm = LLM(str(checkpoint), **(chosen | settings))
        started.append(llm)
        return llm

    yield start_llm
    for llm in started:
        llm.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids without special tokens; prompts of one seed begin alike."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (1024,), generator=generator).tolist()
    return ids[:length]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Equal tokens up to the first choice that is close, and logprobs of them within 1e-4 on average."""
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        differences: list[float] = []
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            if theirs.top[0][1] - theirs.top[1][1] < CLEAR_MARGIN:
                break
            assert mine.token_id == theirs.token_id
            differences.append(abs(mine.logprob - theirs.logprob))
        assert sum(differences) <= 1e-4 * len(differences)


def test_few_slots_and_snapshots(start: Start) -> None:
    """All at once on 5 slots in small chunks, then each again with what is cached, then the next turn of each."""
    plain = start(**PLAIN)
    snapshots = {"state_snapshot_stride": 16, "state_snapshot_memory": 16 << 20}
    fast = start(max_running_requests=5, max_prefill_tokens=96, **snapshots)
    prompts = [prompt(length) for length in LENGTHS]
    expected = [plain.generate([each], GREEDY)[0] for each in prompts]
    assert_same(fast.generate(prompts, GREEDY), expected)
    again = [fast.generate([each], GREEDY)[0] for each in prompts]
    assert_same(again, expected)
    assert all(result.num_cached_tokens > 0 for result, length in zip(again, LENGTHS, strict=True) if length >= 24)
    turns = [each + result.token_ids + prompt(9, seed=1) for each, result in zip(prompts, again, strict=True)]
    found = fast.generate(turns, GREEDY)
    assert_same(found, [plain.generate([each], GREEDY)[0] for each in turns])
    assert all(
        result.num_cached_tokens >= length for result, length in zip(found, LENGTHS, strict=True) if length >= 63
    )


def test_preemption(start: Start, checkpoint: Path) -> None:
    """Ten requests on pages for three."""
    groups = plan_of(Qwen35Family(), checkpoint).kv_groups
    per_page = 16 * 4 * sum(group.values_per_token * len(group.layers) for group in groups)
    per_slot = sum(group.bytes_per_slot(4) for group in groups)
    many = [prompt(60 + index, seed=index) for index in range(10)]
    plain = start(**PLAIN)
    expected = [plain.generate([each], GREEDY)[0] for each in many]
    llm = start(
        kv_cache_memory=19 * per_page + (10 + 1 + 4) * per_slot,
        max_model_len=None,
        max_running_requests=10,
        state_snapshot_memory=4 * per_slot,
        state_snapshot_stride=16,
    )
    assert_same(llm.generate(many, GREEDY), expected)
    assert llm._client.stats.preemptions > 0
