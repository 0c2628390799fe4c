"""Triton kernel of a decode row's attention, from its stacked projection to its result, in one launch.

Owns what runs on the device; grids, tiles and buffers are the caller's (ops/attention_triton.py). A program turns its heads' queries,
attends to its part of the context, and the last one of a row and kv head joins the parts: no launch before or after it.

Shape suffixes: T tokens (one a row), H query heads, K key/value heads, D head dim, C parts of a split context; of one program: M query
rows (the heads of one kv head, padded), X heads.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from pegainfer_core.ops.attention_kernels import attend_keys, finish_part


@triton.jit
def _turned(
    heads_ptr,
    head_X,
    valid_X,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads [X, D] after the RMS norm (NORM) and the rotation, rounded where token_kernels.heads_kernel rounds."""
    DTYPE: tl.constexpr = heads_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    offset_D = tl.arange(0, BLOCK_D)
    inside_D = offset_D < HEAD_DIM
    inside_XD = valid_X[:, None] & inside_D[None, :]
    first_D = offset_D < HALF
    other_D = tl.where(first_D, offset_D + HALF, offset_D - HALF)
    place_X1 = head_X[:, None] * HEAD_DIM
    x_XD = tl.load(heads_ptr + place_X1 + offset_D[None, :], mask=inside_XD, other=0.0).to(tl.float32)
    other_XD = tl.load(heads_ptr + place_X1 + other_D[None, :], mask=inside_XD, other=0.0).to(tl.float32)
    WEIGHT_DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    if NORM:
        factor_X1 = tl.rsqrt(tl.sum(x_XD * x_XD, axis=1) / HEAD_DIM + eps)[:, None]
        weight_1D = tl.load(weight_ptr + offset_D, mask=inside_D, other=0.0).to(tl.float32)[None, :]
        other_weight_1D = tl.load(weight_ptr + other_D, mask=inside_D, other=0.0).to(tl.float32)[None, :]
        x_XD = ((x_XD * factor_X1).to(WEIGHT_DTYPE).to(tl.float32) * weight_1D).to(DTYPE).to(tl.float32)
        other_XD = ((other_XD * factor_X1).to(WEIGHT_DTYPE).to(tl.float32) * other_weight_1D).to(DTYPE).to(tl.float32)
    angle_D = tl.where(first_D, offset_D, offset_D - HALF)
    cos_1D = tl.load(cos_ptr + angle_D, mask=inside_D, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    sin_1D = tl.load(sin_ptr + angle_D, mask=inside_D, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    cross_XD = (other_XD * sin_1D).to(DTYPE).to(tl.float32)
    return ((x_XD * cos_1D).to(DTYPE).to(tl.float32) + tl.where(first_D[None, :], -cross_XD, cross_XD)).to(DTYPE)


@triton.jit(do_not_specialize=["num_parts", "shortest_part", "stride_table"])
def decode_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    write_index_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    arrived_ptr,
    context_lens_ptr,
    page_table_ptr,
    stride_token,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    eps,
    scale_log2,
    num_parts,
    shortest_part,
    NORM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    IEEE: tl.constexpr,
):
    """One kv head's queries of one row over one part of its context, the new token included. Grid (T, K, parts).

    Heads of `qkv` lie side by side: queries, keys, values. Writes `out` [T, H, D], and the new key and value to their place. With SPLIT
    parts [T, H, C, D] and their log2-sums [T, H, C] pass through memory; `arrived` [T, K] counts them, and is 0 before and after.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + row)
    begin = 0
    active = 1
    end = context_len - 1  # what is in the pages already
    if SPLIT:
        length = tl.maximum(shortest_part, (context_len + num_parts - 1) // num_parts)
        length = (length + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        begin = part * length
        if begin >= context_len:
            return
        end = tl.minimum(begin + length, end)
        active = (context_len + length - 1) // length

    position = tl.load(position_ptr + row) * (HEAD_DIM // 2)
    row_ptr = qkv_ptr + row * stride_token
    offset_M = tl.arange(0, BLOCK_M)
    offset_D = tl.arange(0, BLOCK_D)
    valid_M = offset_M < GROUP
    q_MD = _turned(
        *(row_ptr, kv_head * GROUP + offset_M, valid_M, query_weight_ptr, cos_ptr + position, sin_ptr + position, eps),
        *(NORM, HEAD_DIM, BLOCK_D),
    )
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if part == active - 1:
        # the new token: its key and value come from the projection, not from the page they are stored in
        head_X = tl.arange(0, 1)
        k_1D = _turned(
            *(row_ptr, KV_HEADS * GROUP + kv_head + head_X, head_X == 0, key_weight_ptr),
            *(cos_ptr + position, sin_ptr + position, eps, NORM, HEAD_DIM, BLOCK_D),
        )
        inside_1D = (offset_D < HEAD_DIM)[None, :]
        value_ptr = row_ptr + (KV_HEADS * (GROUP + 1) + kv_head) * HEAD_DIM
        v_1D = tl.load(value_ptr + offset_D[None, :], mask=inside_1D, other=0.0)
        place_1D = tl.load(write_index_ptr + row) * stride_slot + kv_head * stride_kv_head + offset_D[None, :]
        tl.store(k_ptr + place_1D, k_1D, mask=inside_1D)
        tl.store(v_ptr + place_1D, v_1D, mask=inside_1D)
        max_M = tl.sum(q_MD.to(tl.float32) * k_1D.to(tl.float32), axis=1) * scale_log2
        sum_M += 1.0
        acc_MD += v_1D.to(tl.float32)

    table_ptr = page_table_ptr + row * stride_table
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    position_M = tl.full([BLOCK_M], 0, tl.int32) + context_len
    middle = begin + (end - begin) // BLOCK_N * BLOCK_N
    acc_MD, max_M, sum_M = attend_keys(
        *(q_MD, acc_MD, max_M, sum_M, position_M, begin, middle),
        *(table_ptr, k_ptr, v_ptr, stride_page, stride_slot, scale_log2),
        *(False, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, IEEE),
    )
    acc_MD, max_M, sum_M = attend_keys(
        *(q_MD, acc_MD, max_M, sum_M, position_M, middle, end),
        *(table_ptr, k_ptr, v_ptr, stride_page, stride_slot, scale_log2),
        *(True, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, IEEE),
    )
    head_M = ((row * KV_HEADS + kv_head) * GROUP + offset_M).to(tl.int64)
    finish_part(
        *(acc_MD / sum_M[:, None], max_M + tl.log2(sum_M), head_M, head_M * num_parts, valid_M, part, active),
        *(out_ptr, part_ptr, lse_ptr, arrived_ptr + tl.program_id(0) * KV_HEADS + kv_head),
        *(HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_C, SPLIT),
    )
