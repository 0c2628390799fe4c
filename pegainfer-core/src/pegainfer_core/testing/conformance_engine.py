"""The part of the conformance kit that goes through the engine: what schedules, caches and batches must not change tokens.

Owns the checks only; `conformance.FamilyConformance` brings them together with the rest. The family must be installed: the
engine finds it through its entry point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegainfer_core.family import ModelFamily
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.testing.engine_driver import GREEDY, EngineDriver, Generated
from pegainfer_core.testing.paged_model import plan_of
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_core.testing.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE


class EngineConformance:
    """Checks through the engine. Attributes are described in `FamilyConformance`."""

    family: ClassVar[ModelFamily]
    configs: ClassVar[Mapping[str, Mapping[str, Any]]]
    page_size: ClassVar[int]
    prompt_length: ClassVar[int]
    tolerance: ClassVar[float]

    def reference(self, path: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """float32 logits [tokens, V] of each prompt."""
        raise NotImplementedError

    def prompt(self, length: int | None = None, seed: int = 0) -> list[int]:
        """Random ids of the tiny tokenizer, special ones left out."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.prompt_length if length is None else length,)
        ids: list[int] = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, size, generator=generator).tolist()
        return ids

    def prompts(self) -> list[list[int]]:
        """Six prompts, from one token to the longest; lengths on both sides of a page's end."""
        lengths = (1, 2, self.page_size - 1, self.page_size, self.page_size + 1, self.prompt_length)
        return [self.prompt(length, seed=length) for length in lengths]

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, checkpoint: Path) -> EngineDriver:
        """An engine with default settings over `checkpoint`."""
        return EngineDriver(checkpoint, page_size=cls.page_size)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, engine: EngineDriver) -> list[Generated]:
        """What each of `prompts` gives alone."""
        return [engine.generate([prompt])[0] for prompt in cls().prompts()]

    def assert_same_tokens(self, found: Sequence[Generated], expected: Sequence[Generated]) -> None:
        """Equal tokens, and logprobs within the tolerance."""
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            pairs = zip(one.logprobs, other.logprobs, strict=True)
            differences = [abs(mine.logprob - theirs.logprob) for mine, theirs in pairs]
            assert sum(differences) <= self.tolerance * len(differences)

    def test_engine_continues_like_the_reference(self, config_name: str, tmp_path: Path) -> None:
        """Greedy tokens are the reference's wherever its choice is clear, with its logprobs."""
        path = write_tiny_checkpoint(tmp_path, self.family, self.configs[config_name])
        prompts = self.prompts()
        found = EngineDriver(path, page_size=self.page_size).generate(prompts)
        whole = [prompt + result.token_ids for prompt, result in zip(prompts, found, strict=True)]
        for prompt, result, logits_TV in zip(prompts, found, self.reference(path, whole), strict=True):
            assert len(result.token_ids) == GREEDY.max_tokens
            chosen_TV = logits_TV[len(prompt) - 1 : -1].double().log_softmax(-1)
            top_T2 = chosen_TV.topk(2).values
            clear_T = top_T2[:, 0] - top_T2[:, 1] > 1e-3
            assert torch.equal(torch.tensor(result.token_ids)[clear_T], chosen_TV.argmax(-1)[clear_T])
            expected_T = chosen_TV.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
            found_T = torch.tensor([entry.logprob for entry in result.logprobs])
            assert float((found_T - expected_T).abs().mean()) <= self.tolerance

    def test_prompt_logprobs_equal_the_reference(self, checkpoint: Path, engine: EngineDriver) -> None:
        """Teacher-forced through the engine: the first token has none, every other one its own."""
        prompt = self.prompt()
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        found = engine.generate([prompt], params)[0].prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert [entry.token_id for entry in found[1:] if entry is not None] == prompt[1:]
        (logits_TV,) = self.reference(checkpoint, [prompt])
        expected_T = logits_TV[:-1].double().log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found_T = torch.tensor([entry.logprob for entry in found[1:] if entry is not None])
        assert float((found_T - expected_T).abs().mean()) <= self.tolerance

    def test_together_equals_alone(self, engine: EngineDriver, expected: list[Generated]) -> None:
        """All prompts in one batch."""
        self.assert_same_tokens(engine.generate(self.prompts()), expected)

    @pytest.mark.parametrize(
        "settings",
        [
            {"max_prefill_tokens": 1},
            {"max_prefill_tokens": 3},
            {"max_prefill_tokens": 16},
            {"max_prefill_tokens": 17},
            {"prefix_cache": False},
            {"run_ahead": True},
            {"max_running_requests": 2},
        ],
        ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
    )
    def test_settings_do_not_change_tokens(
        self, settings: dict[str, Any], checkpoint: Path, expected: list[Generated]
    ) -> None:
        """Chunks of any size, no prefix cache, run-ahead, waiting for a slot."""
        engine = EngineDriver(checkpoint, page_size=self.page_size, **settings)
        self.assert_same_tokens(engine.generate(self.prompts()), expected)

    def test_prefix_hit_equals_cold(self, checkpoint: Path) -> None:
        """The same prompt again, and one that goes on from it, start on cached pages and give what a cold engine gives."""
        prompt = self.prompt(3 * self.page_size + 2)
        longer = prompt + self.prompt(self.page_size, seed=1)
        warm = EngineDriver(checkpoint, page_size=self.page_size)
        cold = EngineDriver(checkpoint, page_size=self.page_size, prefix_cache=False).generate([prompt, longer])
        assert [result.num_cached_tokens for result in cold] == [0, 0]
        found = [warm.generate([each])[0] for each in (prompt, prompt, longer)]
        assert [result.num_cached_tokens for result in found] == [0, 3 * self.page_size, 3 * self.page_size]
        self.assert_same_tokens(found, [cold[0], *cold])

    def test_preempted_requests_go_on_the_same(self, checkpoint: Path, expected: list[Generated]) -> None:
        """A pool that holds one request and a half preempts; every request still gives its own tokens."""
        plan = plan_of(self.family, checkpoint)
        page_bytes = self.page_size * 4 * sum(group.values_per_token * len(group.layers) for group in plan.kv_groups)
        assert GREEDY.max_tokens is not None
        longest = -(-(self.prompt_length + GREEDY.max_tokens) // self.page_size)
        num_pages = longest + 2  # and the padding page
        for prefix_cache in (True, False):
            engine = EngineDriver(
                checkpoint,
                page_size=self.page_size,
                kv_cache_memory=page_bytes * (num_pages + 1),
                prefix_cache=prefix_cache,
            )
            assert engine.info.num_pages == num_pages
            assert engine.info.kv_cache_bytes == page_bytes * (num_pages + 1)
            found = engine.generate(self.prompts())
            assert engine.stats.preemptions > 0
            assert engine.stats.num_free_pages == num_pages
            self.assert_same_tokens(found, expected)
