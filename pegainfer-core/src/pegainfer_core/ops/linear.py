"""Matrix products with weights as checkpoints store them, and token embeddings.

Owns the functions and the modules that hold such a weight; parameters start on the meta device and `weights.py` fills
them. Knows no family.

Shape suffixes: O output features, I input features, V vocabulary, E hidden size; leading dimensions are free.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight^T over the last dimension."""
    return F.linear(x, weight_OI)


def embedding(ids: Tensor, weight_VE: Tensor) -> Tensor:
    """Rows of the table for integer ids of any shape."""
    return F.embedding(ids, weight_VE)


class Linear(nn.Module):
    """A weight [out, in] without bias. Projections of the same input are one Linear with their rows stacked."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device="meta"), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """See `linear`."""
        return linear(x, self.weight)


class Embedding(nn.Module):
    """A table [V, E]."""

    def __init__(self, num_embeddings: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size, dtype=dtype, device="meta"), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """See `embedding`."""
        return embedding(ids, self.weight)
