"""What a family's module looks like to the runner, and what it gets.

Owns `Model`, `BuildContext` and `ForwardBatch`. Torch is imported here; planning code must not import this module.

Shape suffixes: T tokens of the step, R rows (requests) of the step, E hidden size, V vocabulary, H query heads, K key/value heads, D head
dim, P pages of the longest row.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pegainfer_core.ops.attention import Attention
from pegainfer_core.ops.states import States


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Where and in which type a module will live. Parameters are created on the meta device; tables are built on `device` at once."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    """Tables over positions need this many entries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The tensors of one step, built complete in `batch.py`. Tokens of one row are adjacent, rows in plan order."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, per token: absolute position in its request."""
    attention: Attention
    """Writes keys and values and attends, for any layer: `batch.attention.run(layer, q, k, v)`."""
    states: States
    """Recurrent state of the layers of kind `state`: `batch.states.layers[layer]`."""


class Model(nn.Module, ABC):
    """A decoder. `forward` computes hidden states, `logits` is applied only to the rows that need them."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states after the last norm, [T, E]."""

    @abstractmethod
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits [R, V] of selected hidden states."""
