"""Experts on CUDA through Triton: tokens sorted by expert on the device, and two grouped products.

Owns the sorting, tiles and grids. Nothing here waits for the device or depends on values, and no step loops over experts, so that every
launch can be captured. ops/moe.py has the plain path.

Shape suffixes: T tokens, K experts of one token, P = T * K pairs, X experts, E hidden size, F intermediate size.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from pegainfer_core.ops.moe_kernels import down_kernel, gate_up_kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTile:
    """Shape of one program: pairs, output features, input features of one turn, and how it runs."""

    pairs: int
    features: int
    depth: int
    warps: int
    stages: int


def tile_for(pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTile:
    """By the pairs of an average expert: few are bound by the weights' bytes, many by arithmetic."""
    if dtype == torch.float32:
        return ExpertTile(pairs=16, features=32, depth=32, warps=4, stages=2)
    if pairs <= 16 * num_experts:
        return ExpertTile(pairs=16, features=32, depth=128, warps=4, stages=3)
    if pairs <= 64 * num_experts:
        return ExpertTile(pairs=64, features=64, depth=64, warps=4, stages=3)
    return ExpertTile(pairs=128, features=64, depth=64, warps=8, stages=3)


def mix_experts(x_TE: Tensor, gate_up_X2FE: Tensor, down_XEF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """See ops/moe.py."""
    assert x_TE.is_contiguous() and gate_up_X2FE.is_contiguous() and down_XEF.is_contiguous(), "rows must be dense"
    num_experts, hidden, inter = down_XEF.shape
    tokens, chosen = ids_TK.shape
    pairs = tokens * chosen
    tile = tile_for(pairs, num_experts, x_TE.dtype)
    flat_P = ids_TK.reshape(-1)
    order_P = flat_P.argsort(stable=True).int()
    counts_X = torch.zeros(num_experts, dtype=torch.int32, device=x_TE.device)
    counts_X.scatter_add_(0, flat_P, torch.ones_like(order_P))
    pair_end_X = counts_X.cumsum(0, dtype=torch.int32)
    tile_end_X = ((counts_X + (tile.pairs - 1)) // tile.pairs).cumsum(0, dtype=torch.int32)
    # every expert that has pairs may have one tile that is not full
    tiles = min(pairs, num_experts) + pairs // tile.pairs
    options = {
        "BLOCK_M": tile.pairs,
        "BLOCK_N": tile.features,
        "BLOCK_K": tile.depth,
        "IEEE": x_TE.dtype == torch.float32,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    hidden_PF = torch.empty(pairs, inter, dtype=x_TE.dtype, device=x_TE.device)
    gate_up_kernel[(tiles, triton.cdiv(inter, tile.features))](
        *(x_TE, gate_up_X2FE, hidden_PF, order_P, pair_end_X, tile_end_X, num_experts, chosen, inter, hidden),
        **options,
    )
    out_PE = torch.empty(pairs, hidden, dtype=x_TE.dtype, device=x_TE.device)
    down_kernel[(tiles, triton.cdiv(hidden, tile.features))](
        *(hidden_PF, down_XEF, out_PE, order_P, weights_TK.contiguous(), pair_end_X, tile_end_X, num_experts, hidden),
        inter,
        **options,
    )
    return out_PE.view(tokens, chosen, hidden).sum(1, dtype=torch.float32).to(x_TE.dtype)
