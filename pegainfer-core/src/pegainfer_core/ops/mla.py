"""Attention over latent vectors: each token leaves one vector and one rotated key in its page, from which every head has its own.

Owns the module that norms, rotates and attends. Projections to and from it are a family's; the forms of the computation, and the choice
among them, are the attention backend's (ops/attention.py). Knows no family.

Shape suffixes: T tokens, H heads, D head dim of queries and keys, V head dim of values, L latent rank, X = L + rotated dimensions,
U rows of one head's key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pegainfer_core.model import ForwardBatch
from pegainfer_core.ops.attention import LatentHeads
from pegainfer_core.ops.norm import RMSNorm
from pegainfer_core.ops.rope import RotaryTable


class LatentAttention(nn.Module):
    """The norm of the latent vector, and the projection from it to each head's key and value (rows: key, value, head by head)."""

    def __init__(
        self,
        layer: int,
        *,
        num_heads: int,
        rank: int,
        key_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        """`key_dim` dimensions of a head's key come from the vector, `rope_dim` are the shared, rotated key. `scale` is of scores."""
        super().__init__()
        self.layer = layer
        self.rank = rank
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.num_heads = num_heads
        self.scale = scale
        self.norm = RMSNorm(rank, eps, dtype)
        size = num_heads * (key_dim + value_dim), rank
        self.up = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)
        self.rope_dim = rope_dim

    def forward(self, q_THD: Tensor, rows_TX: Tensor, rotary: RotaryTable, batch: ForwardBatch) -> Tensor:
        """[T, H * V], from projected queries, and vectors beside shared keys, both before norm and rotation."""
        latent_TL, key_TR = torch.split(rows_TX, [self.rank, self.rope_dim], dim=-1)
        plain_THN, turned_THR = torch.split(q_THD, [self.key_dim, self.rope_dim], dim=-1)
        turned_THR, key_T1R = rotary.forward(turned_THR, key_TR.unsqueeze(1), batch.positions_T)
        heads = LatentHeads(
            q_THD=torch.cat((plain_THN, turned_THR), dim=-1),
            up_HUL=self.up.view(self.num_heads, -1, self.rank),
            value_dim=self.value_dim,
        )
        rows_TX = torch.cat((self.norm(latent_TL.contiguous()), key_T1R[:, 0]), dim=-1)
        return batch.attention.run_latent(self.layer, rows_TX, heads, self.scale).flatten(1)
