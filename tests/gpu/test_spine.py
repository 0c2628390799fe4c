"""The whole engine on a GPU against transformers: prompts, prefixes, batches, chunks, preemption, float32 and bfloat16.

The reference computes in float32 from the same checkpoint, whatever type the engine runs in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core.errors import ConfigError
from pegainfer_core.llm import LLM, Completion
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.testing.paged_model import PagedModel
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_core.testing.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config
from torch import Tensor

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MEDIUM = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=8)
CLEAR_MARGIN = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A random checkpoint and its reference."""

    path: Path
    dtype: str
    reference: Any

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities [tokens, V] after each token, in float64 on the CPU."""
        with torch.inference_mode():
            logits_TV = self.reference(input_ids=torch.tensor([list(token_ids)], device=DEVICE)).logits[0]
        return logits_TV.double().log_softmax(-1).cpu()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["tiny-float32", "tiny-bfloat16", "medium-float32", "medium-bfloat16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers import AutoModelForCausalLM

    size, dtype = request.param.split("-")
    # gains that give logits as wide as a trained model's
    config, gain = (
        (tiny_config(torch_dtype=dtype), 0.15) if size == "tiny" else (tiny_config(torch_dtype=dtype, **MEDIUM), 0.05)
    )
    path = write_tiny_checkpoint(tmp_path_factory.mktemp(request.param), Qwen3Family(), config, gain=gain)
    # eager attention: its products are exact, whatever fused kernels do with float32
    load: Any = AutoModelForCausalLM.from_pretrained
    reference, loading = load(path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(loading.values()), loading
    return Checkpoint(path=path, dtype=dtype, reference=reference.eval().to(DEVICE))


StartLLM = Callable[..., LLM]


@pytest.fixture
def start(checkpoint: Checkpoint) -> Iterator[StartLLM]:
    """Start an LLM of the checkpoint; it is closed after the test."""
    started: list[LLM] = []

    def start_llm(**settings: Any) -> LLM:
        chosen: dict[str, Any] = {"device": DEVICE, "max_running_requests": 32, "max_model_len": 4096}
        chosen |= {"kv_cache_memory": 1 << 30}  # several engines may live at once
        llm = LLM(str(checkpoint.path), **(chosen | settings))
        started.append(llm)
        return llm

    yield start_llm
    for llm in started:
        llm.close()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    low = len(SPECIAL_TOKENS)
    return [torch.randint(low, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def judge(checkpoint: Checkpoint, found: Sequence[tuple[Sequence[tuple[int, float]], int, Tensor]]) -> None:
    """Hold the project's limits over (top 8, chosen id, reference log-probabilities [V]) of many positions."""
    differences = torch.tensor(
        [abs(value - float(reference_V[token])) for top, _, reference_V in found for token, value in top[:8]]
    )
    regrets = [float(reference_V.max() - reference_V[chosen]) for _, chosen, reference_V in found]
    mean, p99, regret = float(differences.mean()), float(differences.quantile(0.99)), max(regrets)
    facts = f"mean {mean:.2e}, p99 {p99:.2e}, regret {regret:.2e} over {len(found)} positions"
    print(f"{checkpoint.path.name}: {facts}")  # noqa: T201 - the figures of the run, shown with -s or -rA
    if checkpoint.dtype == "float32":
        assert mean <= 1e-4, facts
        assert regret <= CLEAR_MARGIN, facts
    else:
        assert mean <= 0.06, facts
        assert p99 <= 0.20, facts
        assert regret <= 0.20, facts


def judge_completions(checkpoint: Checkpoint, completions: Sequence[Completion]) -> None:
    """Every generated position, teacher-forced through the reference."""
    found = []
    for completion in completions:
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == GREEDY.max_tokens
        assert completion.logprobs is not None
        reference_TV = checkpoint.logprobs(completion.prompt_ids + completion.token_ids)
        first = len(completion.prompt_ids) - 1
        for index, entry in enumerate(completion.logprobs):
            assert entry.token_id == completion.token_ids[index] == entry.top[0][0]
            found.append((entry.top, entry.token_id, reference_TV[first + index]))
    judge(checkpoint, found)


def test_auto_serves_on_cuda_with_triton(checkpoint: Checkpoint, start: StartLLM) -> None:
    info = start(device="auto").info
    assert info.device.startswith(DEVICE)
    assert info.attention_backend == "triton"
    assert info.dtype == checkpoint.dtype


def test_prompts_cold_then_with_a_warm_prefix(checkpoint: Checkpoint, start: StartLLM) -> None:
    llm = start()
    many = prompts(1, 2, 15, 16, 17, 33, 200, 1000)
    cold = [llm.generate([prompt], GREEDY)[0] for prompt in many]
    assert all(completion.num_cached_tokens == 0 for completion in cold)
    judge_completions(checkpoint, cold)
    warm = [llm.generate([prompt], GREEDY)[0] for prompt in many]
    assert [completion.num_cached_tokens for completion in warm] == [0, 0, 0, 0, 16, 32, 192, 992]
    judge_completions(checkpoint, warm)


def test_a_batch_of_different_lengths(checkpoint: Checkpoint, start: StartLLM) -> None:
    completions = start().generate(prompts(*range(1, 320, 20), *range(500, 1300, 50), seed=1), GREEDY)
    judge_completions(checkpoint, completions)


def test_small_chunks(checkpoint: Checkpoint, start: StartLLM) -> None:
    completions = start(max_prefill_tokens=32).generate(prompts(5, 33, 64, 150, 300, 47, seed=2), GREEDY)
    judge_completions(checkpoint, completions)


def test_preemption(checkpoint: Checkpoint, start: StartLLM) -> None:
    whole = start()
    page_bytes = whole.info.kv_cache_bytes // (whole.info.num_pages + 1)
    whole.close()
    llm = start(kv_cache_memory=31 * page_bytes, max_model_len=None, max_prefill_tokens=128)
    completions = llm.generate(prompts(*[60] * 8, 100, 100, seed=3), GREEDY)
    assert llm._client.stats.preemptions > 0
    judge_completions(checkpoint, completions)


def test_a_long_prompt_scored_and_continued(checkpoint: Checkpoint, start: StartLLM) -> None:
    (prompt,) = prompts(3500, seed=4)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=8, prompt_logprobs=8)
    (completion,) = start(max_prefill_tokens=1024).generate([prompt], params)
    judge_completions(checkpoint, [completion])
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    reference_TV = checkpoint.logprobs(prompt)
    found = []
    for position, entry in enumerate(completion.prompt_logprobs[1:]):
        assert entry is not None
        found.append((entry.top, entry.top[0][0], reference_TV[position]))
    judge(checkpoint, found)


PLAIN = {"run_ahead": False, "cuda_graphs": False, "fused_ops": False}
"""Kernel by kernel, step after step: what the fast paths must equal."""


@pytest.mark.parametrize("settings", [PLAIN, {"run_ahead": False}, {"cuda_graphs": False}, {"fused_ops": False}])
def test_fast_paths_can_be_removed_one_by_one(
    checkpoint: Checkpoint, start: StartLLM, settings: dict[str, bool]
) -> None:
    many = prompts(3, 40, 200, seed=5)
    fast = start().generate(many, GREEDY)
    other = start(**settings).generate(many, GREEDY)
    judge_completions(checkpoint, other)
    if checkpoint.dtype == "float32":
        assert [completion.token_ids for completion in fast] == [completion.token_ids for completion in other]


def test_replays_at_the_edges_of_their_shapes(checkpoint: Checkpoint, start: StartLLM) -> None:
    """Every number of rows meets every shape edge: greedy and sampled rows side by side, padding between them."""
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=8, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=8)
    fast, plain = start(max_running_requests=33), start(max_running_requests=33, **PLAIN)
    for count in (1, 2, 3, 5, 8, 9, 16, 17, 33):
        many = prompts(*range(5, 5 + count), seed=count)
        params = [sampled if index % 3 == 2 else greedy for index in range(count)]
        found, expected = fast.generate(many, params), plain.generate(many, params)
        judge_completions(checkpoint, found[::3])
        if checkpoint.dtype == "float32":
            assert [one.token_ids for one in found] == [one.token_ids for one in expected], count


def test_a_seed_gives_the_same_text(checkpoint: Checkpoint, start: StartLLM) -> None:
    llm = start(prefix_cache=False)
    many = prompts(*[20] * 12, seed=6)
    params = [SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=seed, max_tokens=24) for seed in range(12)]
    together = [completion.token_ids for completion in llm.generate(many, params)]
    assert len({tuple(token_ids) for token_ids in together}) == 12
    assert [completion.token_ids for completion in llm.generate(many, params)] == together
    if checkpoint.dtype == "float32":  # bfloat16 logits depend on the shape of the batch
        alone = [llm.generate([many[index]], [params[index]])[0].token_ids for index in range(12)]
        assert alone == together


def test_every_page_is_free_afterwards(checkpoint: Checkpoint, start: StartLLM) -> None:
    llm = start()
    llm.generate(prompts(*range(1, 100, 9), seed=7), GREEDY)
    stats = llm._client.stats
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_logits_of_chunks_and_decode_steps(checkpoint: Checkpoint, backend: str) -> None:
    """Without the engine: every logit of a prompt computed in pieces of odd sizes."""
    dtype: torch.dtype = getattr(torch, checkpoint.dtype)
    model = PagedModel(Qwen3Family(), checkpoint.path, device=DEVICE, dtype=dtype, backend=backend)
    (prompt,) = prompts(150, seed=8)
    pieces, start = [], 0
    for size in (70, 1, 1, 16, 1, 61):
        pieces.append(model.forward({"request": prompt[start : start + size]})["request"])
        start += size
    found_TV = torch.cat(pieces).double().log_softmax(-1)
    limit = 1e-4 if dtype == torch.float32 else 0.06
    assert float((found_TV - checkpoint.logprobs(prompt)).abs().mean()) <= limit


def test_a_device_that_is_not_there_is_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        LLM(str(checkpoint.path), device="cuda:99")
