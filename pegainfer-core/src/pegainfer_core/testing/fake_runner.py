"""A runner without tensors that still computes something only a correct scheduler can get right.

Its "KV cache" stores (position, token) per page entry, and the next token is a hash of the whole context as read back through the page
table. So a page shared wrongly, freed too early, written twice or read past its end changes tokens or trips an assertion. Each slot may
have a "recurrent state" too, a hash of the tokens that went into it, which is never cleared: the state of another slot, of an earlier
request, of another boundary, or a snapshot that is not what it should be, changes the tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from pegainfer_core.plan import Join, Row, RowResult, StepPlan, StepResult

VOCAB_SIZE = 512


def next_token(context: Sequence[int], seed: int, output_index: int) -> int:
    """The token that follows `context`: a pure function, so that a run alone is the oracle of every other run."""
    digest = hashlib.blake2b(array("q", [seed, output_index, *context]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected_output(prompt_ids: Sequence[int], seed: int, max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """What a request must produce, whatever runs beside it: up to `max_tokens` tokens, ending before a stop id."""
    context = list(prompt_ids)
    for index in range(max_tokens):
        token_id = next_token(context, seed, index)
        if token_id in stop_ids:
            break
        context.append(token_id)
    return context[len(prompt_ids) :]


def fold(state: bytes, token_ids: Sequence[int]) -> bytes:
    """The state after these tokens, one at a time, so that chunks do not show."""
    for token_id in token_ids:
        state = hashlib.blake2b(state + token_id.to_bytes(8, "little"), digest_size=8).digest()
    return state


class FakeRunner:
    """See the module docstring. `fail_when(plan)` may raise to simulate a failing step."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        fail_when: Callable[[StepPlan], None] | None = None,
        *,
        recurrent: bool = False,
    ) -> None:
        """`recurrent`: tokens depend on the state in the request's slot too."""
        self.page_size = page_size
        self._cells: list[tuple[int, int] | None] = [None] * (num_pages * page_size)
        self._tables: dict[int, list[int]] = {}
        self._joins: dict[int, Join] = {}
        self._last_token: dict[int, int] = {}
        self._recurrent = recurrent
        self._states: dict[int, bytes] = {}
        self._snapshots: dict[int, bytes] = {}
        self._fail_when = fail_when

    def launch(self, plan: StepPlan) -> FakeStep:
        """Compute the plan now; the results are handed out by `wait`."""
        if self._fail_when is not None:
            self._fail_when(plan)
        for join in plan.joins:
            self._joins[join.slot] = join
            self._tables[join.slot] = []
            if join.snapshot is not None:
                self._states[join.slot] = self._snapshots[join.snapshot]
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "one row per slot"
        for row in plan.rows:
            self._write(row)
        results = [self._sample(row) for row in plan.rows]
        for row in plan.rows:
            if row.snapshot is not None:
                self._snapshots[row.snapshot] = self._states[row.slot]
        return FakeStep(StepResult(rows=results))

    def prepare_more(self) -> bool:
        """Nothing to prepare."""
        return False

    def _write(self, row: Row) -> None:
        table = self._tables[row.slot]
        table.extend(row.new_pages)
        end = row.start + row.num_tokens
        assert len(table) == -(-end // self.page_size), "pages cover exactly what is written"
        token_ids = list(row.token_ids)
        if len(token_ids) < row.num_tokens:
            token_ids.append(self._last_token[row.slot])
        if self._recurrent:
            self._states[row.slot] = fold(b"" if row.start == 0 else self._states[row.slot], token_ids)
        for position, token_id in zip(range(row.start, end), token_ids, strict=True):
            page = table[position // self.page_size]
            assert page != 0, "the padding page is never written"
            self._cells[page * self.page_size + position % self.page_size] = (position, token_id)

    def _sample(self, row: Row) -> RowResult:
        join = self._joins[row.slot]
        context: list[int] = []
        for position in range(row.start + row.num_tokens):
            page = self._tables[row.slot][position // self.page_size]
            cell = self._cells[page * self.page_size + position % self.page_size]
            assert cell is not None and cell[0] == position, "reads what was written for this very position"
            context.append(cell[1])
        prompt_logprobs = None
        if row.prompt_logprobs:
            targets = join.prompt_ids[row.start + 1 : row.start + row.num_tokens + 1]
            prompt_logprobs = [(token_id, -1.0, 1, [(token_id, -1.0)]) for token_id in targets]
        if not row.samples:
            return RowResult(token_id=None, prompt_logprobs=prompt_logprobs)
        if self._recurrent and self._states[row.slot] != fold(b"", context):
            context.append(-1)  # another token than the right one
        token_id = next_token(context, join.seed, row.output_index)
        self._last_token[row.slot] = token_id
        logprob = None if join.params.logprobs is None else (-1.0, 1, [(token_id, -1.0)])
        return RowResult(token_id=token_id, logprob=logprob, prompt_logprobs=prompt_logprobs)


class FakeStep:
    """A launched step of the fake runner."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def settle(self) -> None:
        """Every token was chosen at launch."""

    def wait(self) -> StepResult:
        """The results."""
        return self._result
