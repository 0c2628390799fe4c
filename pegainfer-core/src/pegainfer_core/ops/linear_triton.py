"""Matrix products of a few tokens through Triton: launches of linear_kernels.py.

Owns grids and arguments; ops/linear_tiles.py chooses the tile. Weights are dense [O, I] as checkpoints store them.
Nothing here waits for the device or depends on values, so every launch can be captured.

Shape suffixes: T tokens, O output features, I input features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from pegainfer_core.ops.linear_kernels import rows_kernel, tiles_kernel
from pegainfer_core.ops.linear_tiles import LinearTile


def linear(
    x_TI: Tensor,
    weight: Tensor,
    tile: LinearTile,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual_TO: Tensor | None = None,
) -> Tensor:
    """x @ weight^T as [T, O], in x's type.

    `norm_I`: x is RMS-normalised and multiplied by it. `gated`: weight is [2 O, I], gate rows before up rows, and the
    result silu(gate) * up. `residual_TO` is added.
    """
    tokens, depth = x_TI.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    out_TO = torch.empty(tokens, features, dtype=x_TI.dtype, device=x_TI.device)
    residual = out_TO if residual_TO is None else residual_TO
    assert residual.stride(1) == 1, "rows must be dense"
    kernel = tiles_kernel if tile.matrix_units else rows_kernel
    kernel[(triton.cdiv(features, tile.features),)](
        x_TI,
        weight,
        weight if norm_I is None else norm_I,
        residual,
        out_TO,
        *(tokens, features, depth),
        *(x_TI.stride(0), residual.stride(0), eps),
        NORM=norm_I is not None,
        GATED=gated,
        RESIDUAL=residual_TO is not None,
        **_tile_options(x_TI, weight, tile, features),
    )
    return out_TO


def _tile_options(x_TI: Tensor, weight: Tensor, tile: LinearTile, features: int) -> dict[str, Any]:
    """What all kernels are told about their tile."""
    assert x_TI.stride(1) == 1 and weight.is_contiguous(), "rows must be dense"
    options: dict[str, Any] = {}
    if tile.matrix_units:
        options = {"WEIGHT_FIRST": tile.weight_first, "IEEE": x_TI.dtype == torch.float32}
    return options | {
        "EVEN": features % tile.features == 0 and x_TI.shape[1] % tile.depth == 0,
        "BLOCK_T": _token_block(x_TI.shape[0], tile),
        "BLOCK_N": tile.features,
        "BLOCK_K": tile.depth,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def _token_block(tokens: int, tile: LinearTile) -> int:
    """Tokens of a program: all of them, rounded up to what the units take."""
    block: int = triton.next_power_of_2(tokens)
    if not tile.matrix_units:
        return block
    return max(block, 8 if tile.weight_first else 16)
