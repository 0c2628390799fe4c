"""Recurrent state in a step: which slot each row's state is in, and which rows begin from zero.

Owns `States`, what a model with layers of kind `state` sees of them. Knows nothing of requests, scheduling or snapshots: core copies whole
slots between steps, which no model has to know of.

Shape suffixes: T tokens, R rows, S slots.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A step's states, bound to their storage. The first `num_decode_rows` rows have one token each; the other rows follow.

    A row of n > 0 tokens begins from the state in its slot, or from zeros if it is fresh, and leaves there the state after its last token.
    Rows without tokens, and tokens past the last row's end, change nothing. Padding rows share the last slot, which nobody reads.
    """

    layers: list[tuple[Tensor, ...]]
    """Per model layer, the tensors that its group declares, each contiguous, [S, *shape]; empty for layers without state."""
    slots_R: Tensor
    """int64: the slot of each row, distinct but for padding."""
    fresh_R: Tensor
    """int32: 1 for a row that begins from zero, whatever its slot holds (which may be NaN)."""
    query_start_R1: Tensor
    """int32: row r has the step's tokens from entry r up to entry r + 1."""
    query_lens: list[int]
    """Tokens per row, on the host: exact in an eager step, upper bounds in a captured one."""
    num_decode_rows: int
