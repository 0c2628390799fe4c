"""The part of the conformance kit that goes through the engine: what schedules, caches and batches must not change tokens.

Owns the checks only; `conformance.FamilyConformance` brings them together with the rest. The family must be installed: the
engine finds it through its entry point.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegainfer_core.family import ModelFamily
from pegainfer_core.kv.snapshots import GENERATION_PROMPT_TOKENS
from pegainfer_core.llm import LLM
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

    def is_recurrent(self, checkpoint: Path) -> bool:
        """Whether requests have a state beside their pages."""
        return any(group.state for group in plan_of(self.family, checkpoint).kv_groups)

    def every_snapshot(self, checkpoint: Path) -> dict[str, Any]:
        """Settings with which the state at every end of a page is worth a snapshot."""
        return {"state_snapshot_stride": self.page_size} if self.is_recurrent(checkpoint) else {}

    def room(
        self, checkpoint: Path, *, num_pages: int, max_running_requests: int, prefix_cache: bool = True
    ) -> dict[str, Any]:
        """Settings for exactly so many pages beside the padding page, and 5 snapshots where they are needed."""
        groups = plan_of(self.family, checkpoint).kv_groups
        per_page = self.page_size * 4 * sum(group.values_per_token * len(group.layers) for group in groups)
        per_slot = sum(group.bytes_per_slot(4) for group in groups)
        num_snapshots = 5 if prefix_cache and per_slot else 0
        memory = (num_pages + 1) * per_page + (max_running_requests + 1 + num_snapshots) * per_slot
        settings = {
            "kv_cache_memory": memory,
            "max_running_requests": max_running_requests,
            "prefix_cache": prefix_cache,
        }
        return settings | ({"state_snapshot_memory": num_snapshots * per_slot} if num_snapshots else {})

    def _longest_in_pages(self) -> int:
        assert GREEDY.max_tokens is not None
        return -(-(self.prompt_length + GREEDY.max_tokens) // self.page_size)

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

    @pytest.fixture(scope="class")
    @classmethod
    def cold(cls, checkpoint: Path) -> EngineDriver:
        """An engine that caches no prefix."""
        return EngineDriver(checkpoint, page_size=cls.page_size, prefix_cache=False)

    @pytest.mark.parametrize("beyond", [-1, 0, 1, 5])
    @pytest.mark.parametrize("run_ahead", [False, True], ids=["", "run-ahead"])
    def test_prefix_hit_equals_cold(self, beyond: int, run_ahead: bool, checkpoint: Path, cold: EngineDriver) -> None:
        """The same prompt again, one that goes on from it, and the next turn of a chat start on what is cached, and give what a cold
        engine gives; whether the prompt ends before a page's end, there, or after it."""
        size = self.page_size
        prompt = self.prompt(3 * size + beyond)
        warm = EngineDriver(checkpoint, page_size=size, run_ahead=run_ahead, **self.every_snapshot(checkpoint))
        first = warm.generate([prompt])[0]
        longer = prompt + self.prompt(size, seed=1)
        next_turn = prompt + first.token_ids + self.prompt(7, seed=2)
        prompts = [prompt, longer, next_turn]
        expected = cold.generate([prompt, *prompts])
        assert all(result.num_cached_tokens == 0 for result in expected)
        found = [first, *(warm.generate([each])[0] for each in prompts)]
        self.assert_same_tokens(found, expected)
        cached = [result.num_cached_tokens for result in found]
        assert cached[0] == 0
        assert all(count % size == 0 for count in cached)
        if self.is_recurrent(checkpoint):
            # The state of a prompt is saved where the next turn of a chat can still begin from it.
            assert cached[1] >= (len(prompt) - GENERATION_PROMPT_TOKENS) // size * size
        else:
            assert cached[1] == (len(prompt) - 1) // size * size
        assert cached[2] >= cached[1]
        assert cached[3] >= len(prompt) // size * size, "the answer's pages count too"

    def test_turns_of_a_chat_begin_from_the_last_one(self, checkpoint: Path) -> None:
        """Through the checkpoint's template, with default settings: from the second turn on, most of a prompt is cached."""
        if plan_of(self.family, checkpoint).max_context < 512:
            pytest.skip("the first config's context holds no chat")
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        messages = [{"role": "system", "content": "You help. " * 20}]
        with LLM(str(checkpoint)) as warm, LLM(str(checkpoint), prefix_cache=False) as cold:
            earlier = 0
            for turn in range(4):
                messages.append({"role": "user", "content": f"Question {turn}?"})
                found = warm.chat(messages, params)
                assert found.token_ids == cold.chat(messages, params).token_ids
                assert found.num_cached_tokens >= (earlier * 2) // 3
                earlier = len(found.prompt_ids)
                messages.append({"role": "assistant", "content": found.text})
            assert earlier < 512

    def test_many_requests_share_few_slots(self, checkpoint: Path, expected: list[Generated]) -> None:
        """64 requests on 8 slots: all finish, in the order of their arrival but for those that run together, with their own tokens."""
        engine = EngineDriver(checkpoint, page_size=self.page_size, max_running_requests=8)
        order: list[int] = []
        requests = [(self.prompts()[index % 6], GREEDY) for index in range(64)]
        found = engine.generate_each(requests, on_end=order.append)
        assert max(abs(place - index) for place, index in enumerate(order)) < 8
        self.assert_same_tokens(found, [expected[index % 6] for index in range(64)])

    @pytest.mark.parametrize("run_ahead", [False, True], ids=["", "run-ahead"])
    def test_requests_that_come_and_go_do_not_mix(
        self, run_ahead: bool, checkpoint: Path, expected: list[Generated]
    ) -> None:
        """Random arrivals and aborts on few slots and few pages."""
        engine = EngineDriver(
            checkpoint,
            page_size=self.page_size,
            run_ahead=run_ahead,
            max_prefill_tokens=self.page_size + 3,
            **self.room(checkpoint, num_pages=2 * self._longest_in_pages(), max_running_requests=4),
            **self.every_snapshot(checkpoint),
        )
        chance = random.Random(run_ahead)
        prompts = [self.prompts()[chance.randrange(6)] for _ in range(40)]
        found = engine.generate_each(
            [(prompt, GREEDY) for prompt in prompts],
            arrives=lambda: chance.random() < 0.3,
            aborts=lambda: chance.random() < 0.02,
        )
        whole = [result for result in found if result.finish_reason != "abort"]
        assert len(found) > len(whole) > 20
        alone = {tuple(prompt): result for prompt, result in zip(self.prompts(), expected, strict=True)}
        for prompt, result in zip(prompts, found, strict=True):
            own = alone[tuple(prompt)].token_ids
            assert result.token_ids == own[: len(result.token_ids)]
            assert result.finish_reason == "abort" or len(result.token_ids) == len(own)

    def test_preempted_requests_go_on_the_same(self, checkpoint: Path, expected: list[Generated]) -> None:
        """A pool that holds one request and a half preempts; every request still gives its own tokens."""
        num_pages = self._longest_in_pages() + 2
        for prefix_cache in (True, False):
            room = self.room(checkpoint, num_pages=num_pages, max_running_requests=6, prefix_cache=prefix_cache)
            snapshots = self.every_snapshot(checkpoint) if prefix_cache else {}
            engine = EngineDriver(checkpoint, page_size=self.page_size, **room, **snapshots)
            assert engine.info.num_pages == num_pages
            assert engine.info.kv_cache_bytes + engine.info.state_bytes == room["kv_cache_memory"]
            found = engine.generate(self.prompts())
            assert engine.stats.preemptions > 0
            assert engine.stats.num_free_pages == num_pages
            self.assert_same_tokens(found, expected)
