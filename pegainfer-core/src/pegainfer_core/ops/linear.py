"""Matrix products with weights as checkpoints store them, alone or with what stands before or after; token embeddings.

Owns the functions, the choice between our kernels and cuBLAS (linear_tiles.py knows which is faster), and the modules that
hold such a weight; parameters start on the meta device and `weights.py` fills them. Knows no family.

Shape suffixes: T tokens, O output features, I input features, V vocabulary, E hidden size; without one, leading
dimensions are free.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.dispatch import shared_memory, use_triton
from pegainfer_core.ops.linear_cpu import PackedWeight
from pegainfer_core.ops.linear_tiles import LinearTile, choose_tile, shared_bytes
from pegainfer_core.ops.norm import RMSNorm


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight^T over the last dimension."""
    if tile := _tile(x, weight_OI):
        from pegainfer_core.ops import linear_triton

        return linear_triton.linear(x, weight_OI, tile)
    return _product(x, weight_OI)


def norm_linear(x_TI: Tensor, norm: RMSNorm, weight_OI: Tensor) -> Tensor:
    """norm(x) @ weight^T."""
    if _norm_fits(x_TI) and (tile := _tile(x_TI, weight_OI)):
        from pegainfer_core.ops import linear_triton

        return linear_triton.linear(x_TI, weight_OI, tile, norm_I=norm.weight, eps=norm.eps)
    return linear(norm(x_TI), weight_OI)


def norm_gated_linear(x_TI: Tensor, norm: RMSNorm, gate_up_2OI: Tensor) -> Tensor:
    """silu(gate) * up [T, O] of gate and up projections of norm(x); the weight holds gate rows, then up rows."""
    if tile := _tile(x_TI, gate_up_2OI, gated=True):
        from pegainfer_core.ops import linear_triton

        if _norm_fits(x_TI):
            return linear_triton.linear(x_TI, gate_up_2OI, tile, norm_I=norm.weight, eps=norm.eps, gated=True)
        return linear_triton.linear(norm(x_TI), gate_up_2OI, tile, gated=True)
    return silu_mul(_product(norm(x_TI), gate_up_2OI))


def linear_add(x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor) -> Tensor:
    """residual + x @ weight^T. May be computed in the residual's memory: do not use that tensor afterwards."""
    if tile := _tile(x_TI, weight_OI):
        from pegainfer_core.ops import linear_triton

        return linear_triton.linear(x_TI, weight_OI, tile, residual_TO=residual_TO)
    if use_triton(x_TI):
        return residual_TO.addmm_(x_TI, weight_OI.T)  # cuBLAS adds before it rounds
    return residual_TO + linear(x_TI, weight_OI)


def _product(x: Tensor, weight_OI: Tensor) -> Tensor:
    return weight_OI.product(x) if isinstance(weight_OI, PackedWeight) else F.linear(x, weight_OI)


def _tile(x: Tensor, weight_OI: Tensor, gated: bool = False) -> LinearTile | None:
    """How our kernels do it, where they may and are the faster ones."""
    if x.dim() != 2 or not use_triton(x):
        return None
    features = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    tile = choose_tile(x.shape[0], features, weight_OI.shape[1], x.dtype, gated)
    fits = tile is not None and shared_bytes(tile, x.shape[0], x.dtype, gated) <= shared_memory(x.device)
    return tile if fits else None


def _norm_fits(x: Tensor) -> bool:
    """The kernels apply the norm's factor last: until then float16 could overflow on the matrix units."""
    return x.dtype != torch.float16


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
