"""Triton kernel of attention over latent pages: queries, taken to the vectors' space, against rows that all heads share.

Owns what runs on the device; grids, tiles and buffers are the caller's (ops/latent_triton.py). A row's vector is read once and serves as
key and as value.

Shape suffixes: T tokens, H heads, L latent rank, R rotated dimensions, C parts of a split context; of one program: M query rows (tokens x
heads of one group), N rows of the pages.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from pegainfer_core.ops.attention_kernels import find_row, finish_part


@triton.jit
def _attend_rows(
    q_ML,
    q_MR,
    acc_ML,
    max_M,
    sum_M,
    position_M,
    begin,
    end,
    table_ptr,
    cache_ptr,
    stride_page,
    stride_slot,
    scale_log2,
    MASKED: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Online softmax over rows [begin, end) of the pages. Without MASKED these are whole tiles that every query sees."""
    precision: tl.constexpr = "ieee" if IEEE else None
    offset_L = tl.arange(0, BLOCK_L)
    offset_R = tl.arange(0, BLOCK_R)
    for start in range(begin, end, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        inside_N = key_N < end
        page_N = tl.load(table_ptr + key_N // PAGE_SIZE, mask=inside_N, other=0)
        place_N1 = (page_N.to(tl.int64) * stride_page + (key_N % PAGE_SIZE) * stride_slot)[:, None]
        inside_NL = inside_N[:, None] & (offset_L < RANK)[None, :]
        inside_NR = inside_N[:, None] & (offset_R < ROPE)[None, :]
        latent_NL = tl.load(cache_ptr + place_N1 + offset_L[None, :], mask=inside_NL, other=0.0)
        shared_NR = tl.load(cache_ptr + place_N1 + RANK + offset_R[None, :], mask=inside_NR, other=0.0)
        score_MN = tl.dot(q_ML, tl.trans(latent_NL), input_precision=precision)
        score_MN = tl.dot(q_MR, tl.trans(shared_NR), score_MN, input_precision=precision)
        if MASKED:
            seen_MN = inside_N[None, :] & (key_N[None, :] <= position_M[:, None])
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MN, 1) * scale_log2)
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)  # see attention_kernels.attend_keys
        weight_MN = tl.exp2(score_MN * scale_log2 - base_M[:, None])
        decay_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
        acc_ML = tl.dot(weight_MN.to(latent_NL.dtype), latent_NL, acc_ML * decay_M[:, None], input_precision=precision)
        max_M = new_max_M
    return acc_ML, max_M, sum_M


@triton.jit(do_not_specialize=["first", "num_rows", "num_parts", "shortest_part", "stride_table"])
def attend_latent_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    arrived_ptr,
    query_start_ptr,
    context_lens_ptr,
    page_table_ptr,
    stride_page,
    stride_slot,
    stride_table,
    scale_log2,
    first,
    num_rows,
    num_parts,
    shortest_part,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    IEEE: tl.constexpr,
):
    """One tile of queries of one group of heads over one part of its context. Grid (query blocks, groups, parts).

    Queries are [T, H, L + R], dense; rows and tokens start at `first`. Writes `out` [T, H, L]. With SPLIT parts [T, H, C, L] and their
    log2-sums [T, H, C], both counted from `first`, pass through memory; `arrived` [query blocks, groups] counts them.
    """
    group = tl.program_id(1)
    part = tl.program_id(2)
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // GROUP
    if DECODE:
        row = tl.program_id(0)
        query_len = 1
        query = 0
    else:
        # later blocks of a row see more: they go first, so that short ones fill the end of the launch
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        row = find_row(query_start_ptr, first, num_rows, block, BLOCK_Q)
        row_start = tl.load(query_start_ptr + first + row)
        query_len = tl.load(query_start_ptr + first + row + 1) - row_start
        query = (block - ((row_start - first) // BLOCK_Q + row)) * BLOCK_Q
        if query >= query_len:
            return
    token = tl.load(query_start_ptr + first + row) + query
    context_len = tl.load(context_lens_ptr + first + row)
    first_position = context_len - query_len + query

    offset_M = tl.arange(0, BLOCK_M)
    offset_L = tl.arange(0, BLOCK_L)
    offset_R = tl.arange(0, BLOCK_R)
    query_M = offset_M // GROUP
    valid_M = (query_M < BLOCK_Q) & (query + query_M < query_len)
    position_M = first_position + query_M
    head_place_M = (token + query_M).to(tl.int64) * (GROUPS * GROUP) + group * GROUP + offset_M % GROUP

    begin = 0
    end = tl.minimum(context_len, first_position + BLOCK_Q)
    active = 1
    if SPLIT:
        length = tl.maximum(shortest_part, (end + num_parts - 1) // num_parts)
        length = (length + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        begin = part * length
        if part > 0 and begin >= end:
            return
        active = tl.maximum((end + length - 1) // length, 1)  # a padding row has no key at all
        end = tl.minimum(begin + length, end)
    table_ptr = page_table_ptr + (first + row).to(tl.int64) * stride_table
    q_place_M1 = (head_place_M * (RANK + ROPE))[:, None]
    valid_ML = valid_M[:, None] & (offset_L < RANK)[None, :]
    valid_MR = valid_M[:, None] & (offset_R < ROPE)[None, :]
    q_ML = tl.load(q_ptr + q_place_M1 + offset_L[None, :], mask=valid_ML, other=0.0)
    q_MR = tl.load(q_ptr + q_place_M1 + RANK + offset_R[None, :], mask=valid_MR, other=0.0)
    acc_ML = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    # rows up to the tile's first position are seen by all its queries; whole tiles of those need no mask
    middle = tl.maximum(begin, tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N)
    acc_ML, max_M, sum_M = _attend_rows(
        *(q_ML, q_MR, acc_ML, max_M, sum_M, position_M, begin, middle),
        *(table_ptr, cache_ptr, stride_page, stride_slot, scale_log2),
        *(False, RANK, ROPE, BLOCK_L, BLOCK_R, BLOCK_N, PAGE_SIZE, IEEE),
    )
    acc_ML, max_M, sum_M = _attend_rows(
        *(q_ML, q_MR, acc_ML, max_M, sum_M, position_M, middle, end),
        *(table_ptr, cache_ptr, stride_page, stride_slot, scale_log2),
        *(True, RANK, ROPE, BLOCK_L, BLOCK_R, BLOCK_N, PAGE_SIZE, IEEE),
    )
    divisor_M = tl.where(sum_M == 0.0, 1.0, sum_M)  # a row without any key gives 0, not 0 / 0; NaN passes
    part_place_M = (head_place_M - first.to(tl.int64) * (GROUPS * GROUP)) * num_parts
    finish_part(
        *(acc_ML / divisor_M[:, None], max_M + tl.log2(divisor_M), head_place_M, part_place_M, valid_M, part, active),
        *(out_ptr, part_ptr, lse_ptr, arrived_ptr + tl.program_id(0) * GROUPS + group),
        *(RANK, BLOCK_M, BLOCK_L, BLOCK_C, SPLIT),
    )
