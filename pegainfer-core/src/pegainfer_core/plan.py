"""What one step computes, as plain data that could be sent to another process.

Owns `StepPlan`. No torch. A plan is frozen, complete and self-contained: the runner needs nothing else from the scheduler, and workers of a
parallel group get the same plan.
"""

from __future__ import annotations

import dataclasses

import msgspec

from pegainfer_core.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A request takes a slot (first admission, or again after preemption). Precedes its first row."""

    slot: int
    params: SamplingParams
    seed: int
    """The request's own or the one drawn for it at arrival."""
    prompt_ids: list[int]
    """Empty unless `params.reads_prompt`."""
    output_ids: list[int]
    """Tokens committed before a preemption; empty at first admission."""
    snapshot: int | None = None
    """Fill the slot's recurrent state from this snapshot before the step."""


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: compute `num_tokens` positions from `start` on, and perhaps sample the next token."""

    slot: int
    start: int
    """Position of the first token; equals the tokens computed before."""
    num_tokens: int
    token_ids: list[int]
    """Input ids the host knows. One fewer than `num_tokens` if the last input is the device's `last_token[slot]`."""
    new_pages: list[int]
    """Appended to the slot's page table, which then covers start + num_tokens positions exactly."""
    samples: bool
    """Whether the logits of the last position choose a token."""
    output_index: int
    """How many tokens of the request were sampled before (position in its output)."""
    prompt_logprobs: bool = False
    """Whether logprobs of this row's prompt tokens are wanted."""
    snapshot: int | None = None
    """Save the slot's recurrent state as this snapshot after the step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Rows are in batch order, decode rows first."""

    index: int
    joins: list[Join]
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(row.num_tokens for row in self.rows)


class RowResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What came of one row, on the host."""

    token_id: int | None
    """None if the row did not sample, or failed."""
    logprob: tuple[float, int, list[tuple[int, float]]] | None = None
    """(logprob, rank, top) of the sampled token where asked for."""
    prompt_logprobs: list[tuple[int, float, int, list[tuple[int, float]]]] | None = None
    """(token id, logprob, rank, top) for the prompt tokens that follow this row's positions."""
    error: str | None = None
    """Set if this row's logits were not finite or its grammar cannot go on; the request fails, the others go on."""
    complete: bool = False
    """Whether this token makes the answer whole, by its grammar: the request ends with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Parallel to `StepPlan.rows`."""

    rows: list[RowResult]
