"""Gated DeltaNet through Triton: launches of gdn_kernels.py.

Owns chunk sizes, grids and what passes between the kernels. Gives what gdn_torch.py gives, up to rounding. Invariant: no
launch waits for the device, and every grid follows from numbers the host knows (tokens and rows, padding included), so
that a captured launch serves every step of its shape.

Shape suffixes: as in ops/gdn.py; and U prompt tokens, B tokens of a chunk.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from pegainfer_core.ops.dispatch import shared_memory
from pegainfer_core.ops.gdn import GatedDeltaNetWeights
from pegainfer_core.ops.gdn_kernels import (
    convolve_kernel,
    gated_norm_kernel,
    prepare_kernel,
    scan_kernel,
    step_kernel,
)
from pegainfer_core.ops.states import States

DECODE_VALUES = 32
"""Columns of the state that one program of a decode row holds at a time."""
DEEP_PIPELINE_BYTES = 160 << 10
"""Shared memory for two stages of the scan at published widths."""

NORM_HEADS = 8
"""Heads of one program of the norm."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTile:
    """Shapes of the programs that work on prompts."""

    chunk: int
    """Tokens, a power of two of at least 16."""
    values: int
    """Columns of the state in one program of the scan, a power of two of at least 16."""
    scan_stages: int
    """Depth of the scan's pipeline."""
    dots: str
    """Precision of products; matters to float32 alone."""
    solve: str
    """Precision of products within the inverse of a chunk's triangular system, which are float32."""
    warps: int = 4


def chunk_tile(dtype: torch.dtype, device: torch.device) -> ChunkTile:
    """Fits in 99 KiB of shared memory where there is no more.

    Narrow results are rounded to 8 or 11 bits, so tf32 in the triangular system, of 11 bits, costs nothing that counts.
    """
    if dtype == torch.float32:
        return ChunkTile(chunk=16, values=16, scan_stages=1, dots="ieee", solve="ieee")
    deep = device.type == "cuda" and shared_memory(device) >= DEEP_PIPELINE_BYTES
    return ChunkTile(chunk=64, values=32, scan_stages=2 if deep else 1, dots="tf32", solve="tf32")


def gated_delta_net(
    projected_TP: Tensor,
    weights: GatedDeltaNetWeights,
    states: States,
    layer: int,
    positions_T: Tensor,
    tile: ChunkTile | None = None,
) -> Tensor:
    """See gdn.gated_delta_net. `tile`: see chunk_tile."""
    conv_SWC, state_SHKV = states.layers[layer]
    assert projected_TP.stride(1) == 1 and conv_SWC.is_contiguous() and state_SHKV.is_contiguous()
    sizes = _sizes(conv_SWC, state_SHKV)
    heads, value_dim = state_SHKV.shape[1], state_SHKV.shape[3]
    out_TX = torch.empty(len(projected_TP), heads * value_dim, dtype=projected_TP.dtype, device=projected_TP.device)
    decode = states.num_decode_rows
    if decode:
        step_kernel[(decode, heads)](
            *(projected_TP, weights.conv_C1W, weights.A_log_H, weights.dt_bias_H, weights.norm_V),
            *(conv_SWC, state_SHKV, states.slots_R, states.fresh_R, positions_T),
            *(out_TX, projected_TP.stride(0), weights.eps),
            **sizes,
            BLOCK_V=min(DECODE_VALUES, value_dim),
            num_warps=4,
        )
    if len(projected_TP) > decode and len(states.slots_R) > decode:
        tile = tile or chunk_tile(projected_TP.dtype, projected_TP.device)
        _prompts(projected_TP, weights, states, layer, positions_T, tile, out_TX[decode:])
    return out_TX


def _prompts(
    projected_TP: Tensor,
    weights: GatedDeltaNetWeights,
    states: States,
    layer: int,
    positions_T: Tensor,
    tile: ChunkTile,
    out_UX: Tensor,
) -> None:
    """The rows after the decode rows, into `out_UX`."""
    conv_SWC, state_SHKV = states.layers[layer]
    _, heads, key_dim, value_dim = state_SHKV.shape
    decode, rows, tokens = states.num_decode_rows, len(states.slots_R) - states.num_decode_rows, len(out_UX)
    between = _between(tokens, heads, key_dim, value_dim, tile.chunk, projected_TP)
    sizes = _sizes(conv_SWC, state_SHKV)
    channels = conv_SWC.shape[2]
    mixed_UC = torch.empty(tokens, channels, dtype=projected_TP.dtype, device=projected_TP.device)
    # rows begin chunks of their own; a step of U tokens in n rows has at most U / B + n
    chunks = min(tokens, tokens // tile.chunk + rows)
    places = {"CHUNK": tile.chunk, "BLOCK_R": triton.next_power_of_2(rows)}
    convolve_kernel[(chunks, 2 * heads // sizes["GROUP"] + heads)](
        *(projected_TP, weights.conv_C1W, conv_SWC),
        *(states.slots_R, states.query_start_R1, positions_T),
        *(mixed_UC, projected_TP.stride(0), decode, rows),
        **sizes,
        **places,
        num_warps=tile.warps,
    )
    gates_TX = projected_TP[:, channels + heads * value_dim :]
    prepare_kernel[(chunks, heads)](
        *(gates_TX, weights.A_log_H, weights.dt_bias_H, states.query_start_R1, mixed_UC),
        *between,
        *(gates_TX.stride(0), decode, rows),
        **{name: size for name, size in sizes.items() if name != "TAPS"},
        **places,
        LEVELS=tile.chunk.bit_length() - 1,
        DOTS=tile.dots,
        SOLVE=tile.solve,
        num_warps=tile.warps,
    )
    values = min(tile.values, value_dim)
    scan_kernel[(rows, heads, value_dim // values)](
        *(projected_TP, conv_SWC, state_SHKV),
        *(states.slots_R, states.fresh_R, states.query_start_R1, positions_T),
        *between,
        *(out_UX, projected_TP.stride(0), decode),
        **sizes,
        CHUNK=tile.chunk,
        BLOCK_V=values,
        DOTS=tile.dots,
        num_warps=tile.warps,
        num_stages=tile.scan_stages,
    )
    z_UX = projected_TP[decode:, channels:]
    gated_norm_kernel[(tokens, triton.cdiv(heads, NORM_HEADS))](
        *(out_UX, z_UX, weights.norm_V, z_UX.stride(0), weights.eps),
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_H=NORM_HEADS,
        num_warps=4,
    )


def _between(
    tokens: int, heads: int, key_dim: int, value_dim: int, chunk: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What prepare_kernel leaves for scan_kernel: readers, changes, queries, keys, products, sums of g."""
    widths = (key_dim, value_dim, key_dim, key_dim, chunk)
    reader, change, query, key, within = (
        torch.empty(tokens, heads, width, dtype=like.dtype, device=like.device) for width in widths
    )
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=like.device)
    return reader, change, query, key, within, sums


def _sizes(conv_SWC: Tensor, state_SHKV: Tensor) -> dict[str, int]:
    """Constants of the layer that its kernels are compiled for."""
    _, heads, key_dim, value_dim = state_SHKV.shape
    _, taps, channels = conv_SWC.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    return {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TAPS": taps,
    }
