"""Triton kernels of experts: matrix products of tokens in groups, each group with its own expert's weights.

Owns what runs on the device; grids, tiles and buffers are the caller's (ops/moe_triton.py). A program finds its expert on the device, so
that a launch depends on no value.

Shape suffixes: P pairs of token and expert, X experts, E hidden size, F intermediate size; of one program: M pairs, N output features,
K input features.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _pairs_of(block, pair_end_ptr, tile_end_ptr, num_experts, BLOCK_M: tl.constexpr):
    """The expert of tile `block`, the first of its pairs in sorted order, and the end of that expert's pairs."""
    low = 0
    high = num_experts - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_end_ptr + middle) > block:
            high = middle
        else:
            low = middle + 1
    before = tl.maximum(low - 1, 0)
    earlier_tiles = tl.where(low > 0, tl.load(tile_end_ptr + before), 0)
    earlier_pairs = tl.where(low > 0, tl.load(pair_end_ptr + before), 0)
    return low, earlier_pairs + (block - earlier_tiles) * BLOCK_M, tl.load(pair_end_ptr + low)


@triton.jit
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    pair_end_ptr,
    tile_end_ptr,
    num_experts,
    chosen,
    features,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
):
    """silu(gate) * up of x [T, E] for sorted pairs, into `out` [P, F]. The weight is [X, 2 F, E]. Grid (tiles, features)."""
    precision: tl.constexpr = "ieee" if IEEE else None
    block = tl.program_id(0)
    if block >= tl.load(tile_end_ptr + num_experts - 1):
        return
    expert, first, end = _pairs_of(block, pair_end_ptr, tile_end_ptr, num_experts, BLOCK_M)
    pair_M = first + tl.arange(0, BLOCK_M)
    valid_M = pair_M < end
    token_M = tl.load(order_ptr + pair_M, mask=valid_M, other=0) // chosen
    feature_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = feature_N < features
    offset_K = tl.arange(0, BLOCK_K)
    x_M1 = x_ptr + (token_M.to(tl.int64) * depth)[:, None]
    gate_N1 = weight_ptr + ((expert.to(tl.int64) * 2 * features + feature_N) * depth)[:, None]
    up_N1 = gate_N1 + features.to(tl.int64) * depth
    gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        place_1K = (start + offset_K)[None, :]
        x_MK = tl.load(x_M1 + place_1K, mask=valid_M[:, None] & (place_1K < depth), other=0.0)
        inside_NK = inside_N[:, None] & (place_1K < depth)
        gate_NK = tl.load(gate_N1 + place_1K, mask=inside_NK, other=0.0)
        up_NK = tl.load(up_N1 + place_1K, mask=inside_NK, other=0.0)
        gate_MN = tl.dot(x_MK, tl.trans(gate_NK), gate_MN, input_precision=precision)
        up_MN = tl.dot(x_MK, tl.trans(up_NK), up_MN, input_precision=precision)
    value_MN = gate_MN / (1.0 + tl.exp(-gate_MN)) * up_MN
    out_MN = out_ptr + (pair_M.to(tl.int64) * features)[:, None] + feature_N[None, :]
    tl.store(out_MN, value_MN.to(out_ptr.dtype.element_ty), mask=valid_M[:, None] & inside_N[None, :])


@triton.jit
def down_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    scale_ptr,
    pair_end_ptr,
    tile_end_ptr,
    num_experts,
    features,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
):
    """x [P, F] of sorted pairs times the experts' [X, E, F] and each pair's scale, into `out` [P, E] in the pairs' own order."""
    precision: tl.constexpr = "ieee" if IEEE else None
    block = tl.program_id(0)
    if block >= tl.load(tile_end_ptr + num_experts - 1):
        return
    expert, first, end = _pairs_of(block, pair_end_ptr, tile_end_ptr, num_experts, BLOCK_M)
    pair_M = first + tl.arange(0, BLOCK_M)
    valid_M = pair_M < end
    place_M = tl.load(order_ptr + pair_M, mask=valid_M, other=0)
    feature_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = feature_N < features
    offset_K = tl.arange(0, BLOCK_K)
    x_M1 = x_ptr + (pair_M.to(tl.int64) * depth)[:, None]
    weight_N1 = weight_ptr + ((expert.to(tl.int64) * features + feature_N) * depth)[:, None]
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        place_1K = (start + offset_K)[None, :]
        x_MK = tl.load(x_M1 + place_1K, mask=valid_M[:, None] & (place_1K < depth), other=0.0)
        weight_NK = tl.load(weight_N1 + place_1K, mask=inside_N[:, None] & (place_1K < depth), other=0.0)
        acc_MN = tl.dot(x_MK, tl.trans(weight_NK), acc_MN, input_precision=precision)
    acc_MN *= tl.load(scale_ptr + place_M, mask=valid_M, other=0.0)[:, None]
    out_MN = out_ptr + (place_M.to(tl.int64) * features)[:, None] + feature_N[None, :]
    tl.store(out_MN, acc_MN.to(out_ptr.dtype.element_ty), mask=valid_M[:, None] & inside_N[None, :])
