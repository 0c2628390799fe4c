"""What binds the next token of a request: its thinking's budget, then its grammar, then its end.

Owns that state machine, one `Constraint` for each slot that needs it, and `Masks`, which computes the masks of a whole step in a thread
beside the step loop. Knows nothing of logits. No torch.

Shape suffixes: C constraints, W int32 words of 32 ids each.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import numpy as np

from pegainfer_core.grammars import Grammars, mask_words
from pegainfer_core.plan import Join
from pegainfer_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Phase = Literal["before", "thinking", "answer", "ended"]
ALL = np.uint32(0xFFFFFFFF)


class Constraint:
    """Takes each token of the output, and says which may follow. Its mask is computed by `Masks`."""

    def __init__(
        self, params: SamplingParams, matcher: LLMatcher | None, stop_ids: Sequence[int], end_ids: Sequence[int]
    ) -> None:
        """`stop_ids` end this request; `end_ids` are those and every EOS: none of them is ever part of the answer."""
        self.matcher = matcher
        self.mask: Future[None] | None = None
        """Of the next token; done when `words_W` is set."""
        self.words_W: np.ndarray | None = None
        self.complete = False
        """Whether the answer is whole and nothing may follow it."""
        self.problem: str | None = None
        """Why no token may follow although the answer is not complete."""
        self._thinking = params.thinking
        self._min_tokens = params.min_tokens
        self._stop_ids = list(stop_ids)
        self._end_ids = list(end_ids)
        self._num_tokens = 0
        self._num_thinking = 0
        self._phase: Phase = "answer"
        if params.thinking is not None:
            self._phase = "thinking" if params.thinking.open else "before"

    @property
    def binds(self) -> bool:
        """Whether some tokens may not be the next one."""
        if self._phase == "ended":
            return False
        return self.matcher is not None or self._exhausted(0)

    @property
    def ended(self) -> bool:
        """Whether the request has no next token."""
        return self._phase == "ended"

    def may_bind(self, num_more: int) -> bool:
        """Whether the token after `num_more` further ones, not known yet, may be bound."""
        return self._phase != "ended" and (self.matcher is not None or self._exhausted(num_more))

    def accept(self, token_id: int) -> None:
        """Take the next token of the output."""
        self._num_tokens += 1
        self.mask = None
        thinking = self._thinking
        if token_id in self._stop_ids:
            self._phase = "ended"
        elif self._phase == "thinking":
            assert thinking is not None
            if token_id == thinking.end_id:
                self._phase = "answer"
            else:
                self._num_thinking += 1
        elif thinking is not None and token_id == thinking.start_id and (self._phase == "before" or not self.matcher):
            self._phase = "thinking"
        else:
            self._answer(token_id)

    def _answer(self, token_id: int) -> None:
        if self.matcher is None:
            return  # free text may still begin to think
        self._phase = "answer"
        if not self.matcher.consume_token(token_id):
            self.problem = f"the grammar cannot be followed any further: {self.matcher.get_error()[:200]}"
        elif self.matcher.is_stopped():
            self.complete = True
            self._phase = "ended"

    def _exhausted(self, num_more: int) -> bool:
        """Whether the budget may be used up after `num_more` further tokens."""
        thinking = self._thinking
        if thinking is None or thinking.budget is None:
            return False
        thinks = self._phase == "thinking" or num_more > 0
        return thinks and self._num_thinking + num_more >= thinking.budget

    # -- the mask, computed by `Masks`

    @property
    def wants_matcher(self) -> bool:
        """Whether the mask begins with the matcher's."""
        return self.matcher is not None and self._phase in ("before", "answer")

    def finish_mask(self, words_W: np.ndarray) -> None:
        """Make the matcher's mask, or an empty one, that of the next token."""
        thinking = self._thinking
        if self._phase == "thinking":
            assert thinking is not None
            if self._exhausted(0):
                words_W[:] = 0
                _allow(words_W, [thinking.end_id])
            else:  # thinks freely, and has an answer to give
                words_W[:] = ALL
                _forbid(words_W, self._end_ids)
        else:
            self._finish_answer(words_W)
            if self._phase == "before" and thinking is not None and thinking.start_id is not None:
                _allow(words_W, [thinking.start_id])
        if not words_W.any():
            self.problem = "the grammar cannot be followed any further with this model's vocabulary"
        self.words_W = words_W

    def _finish_answer(self, words_W: np.ndarray) -> None:
        """End ids are no part of an answer; where it may end, those that end this request are allowed."""
        assert self.matcher is not None
        if self.matcher.is_error():
            self.problem = f"the grammar cannot be followed any further: {self.matcher.get_error()[:200]}"
            return
        given_W = words_W.copy()
        _forbid(words_W, self._end_ids)
        goes_on = bool(words_W.any())
        if self.matcher.is_accepting() and (not goes_on or self._num_tokens >= self._min_tokens):
            _allow(words_W, self._stop_ids)
        elif not goes_on:  # the grammar asks for a token that ends the request
            words_W[:] = given_W


class Masks:
    """One for a sampler. `prepare` begins to compute, `words` waits for what was begun."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], grammars: Grammars | None) -> None:
        """Without `grammars`, requests have none."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pegainfer-masks")
        self._executor: LLExecutor | None = None

    def constraint(self, join: Join, stop_ids: Sequence[int]) -> Constraint | None:
        """What binds a request that takes a slot, after the tokens it has; None if nothing ever does."""
        params = join.params
        if params.grammar is None and (params.thinking is None or params.thinking.budget is None):
            return None
        matcher = None
        if params.grammar is not None:
            assert self._grammars is not None, "only engines that compile grammars admit requests with one"
            matcher = self._grammars.matcher(params.grammar)
        # the id behind the vocabulary is the library's end of a text
        constraint = Constraint(params, matcher, stop_ids, [*stop_ids, *self._eos_token_ids, self._vocab_size])
        for token_id in join.output_ids:
            constraint.accept(token_id)
        self.prepare([constraint])
        return constraint

    def prepare(self, constraints: Sequence[Constraint]) -> None:
        """Begin to compute the masks of the next tokens, in the thread, all together."""
        bound = [constraint for constraint in constraints if constraint.binds and constraint.mask is None]
        if bound:
            computed = self._thread.submit(self._compute, bound)
            for constraint in bound:
                constraint.mask = computed

    def words(self, constraints: Sequence[Constraint]) -> np.ndarray:
        """The masks [C, W], int32, of constraints that bind."""
        self.prepare(constraints)  # those of rows that are void may lack theirs
        return np.stack([_finished(constraint) for constraint in constraints]).view(np.int32)

    def _compute(self, constraints: list[Constraint]) -> None:
        words_CW = np.zeros((len(constraints), mask_words(self._vocab_size)), dtype=np.uint32)
        matchers = [(c.matcher, place) for place, c in enumerate(constraints) if c.wants_matcher]
        if matchers:
            self._fill(matchers, words_CW)
        for constraint, words_W in zip(constraints, words_CW, strict=True):
            constraint.finish_mask(words_W)

    def _fill(self, matchers: list[tuple[LLMatcher | None, int]], words_CW: np.ndarray) -> None:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor()
        self._executor.unsafe_compute_mask_ptr(
            matchers,  # type: ignore[arg-type]
            words_CW.ctypes.data,
            words_CW.shape[1] * 4,
            len(words_CW),
        )


def _finished(constraint: Constraint) -> np.ndarray:
    assert constraint.mask is not None
    constraint.mask.result()
    assert constraint.words_W is not None
    return constraint.words_W


def _allow(words_W: np.ndarray, ids: Sequence[int]) -> None:
    for token_id in ids:
        words_W[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _forbid(words_W: np.ndarray, ids: Sequence[int]) -> None:
    for token_id in ids:
        words_W[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
