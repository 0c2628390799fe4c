"""Triton kernels of paged attention: attend over pages, join the parts of a split context, write keys and values.

Owns what runs on the device; grids, tiles and buffers are the caller's (ops/attention_triton.py). Runs on any CUDA GPU
of compute capability 8.0 or later, and on CPU tensors in Triton's interpreter. Offsets into the cache are int64.

Shape suffixes: T tokens, H query heads, K key/value heads, D head dim, C parts of a split context; of one program:
M query rows (tokens x query heads of one kv head), N keys.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def find_row(query_start_ptr, first, num_rows, block, BLOCK_Q: tl.constexpr):
    """The row (counted from `first`) that owns query block `block`.

    Row r starts at block (tokens before it) // BLOCK_Q + r, which leaves every row room for its last, partial block.
    """
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if (tl.load(query_start_ptr + first + middle) - first) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def attend_keys(
    q_MD,
    acc_MD,
    max_M,
    sum_M,
    position_M,
    begin,
    end,
    table_ptr,
    k_ptr,
    v_ptr,
    stride_page,
    stride_slot,
    scale_log2,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Online softmax over keys [begin, end). Without MASKED these are whole tiles that every query sees."""
    precision: tl.constexpr = "ieee" if IEEE else None
    offset_D = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        if MASKED:
            inside_N = key_N < end
            page_N = tl.load(table_ptr + key_N // PAGE_SIZE, mask=inside_N, other=0)
        else:
            page_N = tl.load(table_ptr + key_N // PAGE_SIZE)
        place_N = page_N.to(tl.int64) * stride_page + (key_N % PAGE_SIZE) * stride_slot
        place_ND = place_N[:, None] + offset_D[None, :]
        if MASKED:
            inside_ND = inside_N[:, None] & (offset_D < HEAD_DIM)[None, :]
            k_ND = tl.load(k_ptr + place_ND, mask=inside_ND, other=0.0)
            v_ND = tl.load(v_ptr + place_ND, mask=inside_ND, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            k_ND = tl.load(k_ptr + place_ND, mask=(offset_D < HEAD_DIM)[None, :], other=0.0)
            v_ND = tl.load(v_ptr + place_ND, mask=(offset_D < HEAD_DIM)[None, :], other=0.0)
        else:
            k_ND = tl.load(k_ptr + place_ND)
            v_ND = tl.load(v_ptr + place_ND)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=precision)
        if MASKED:
            seen_MN = inside_N[None, :] & (key_N[None, :] <= position_M[:, None])
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MN, 1) * scale_log2)
        # a query that has seen no key yet keeps -inf; 0 in its place keeps -inf - -inf out of the exponent
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MN = tl.exp2(score_MN * scale_log2 - base_M[:, None])
        decay_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD * decay_M[:, None], input_precision=precision)
        max_M = new_max_M
    return acc_MD, max_M, sum_M


@triton.jit
def finish_part(
    result_MD,
    lse_M,
    place_M,
    part_place_M,
    valid_M,
    part,
    active,
    out_ptr,
    part_ptr,
    lse_ptr,
    counter_ptr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store a tile's result in `out` [place, D], or, where it is one of several parts of a context, have the last of them join all.

    Parts [part place + C, D] and their log2-sums (-inf: no key) pass through memory; the counter, 0 before and after, says who is last.
    """
    offset_D = tl.arange(0, BLOCK_D)
    valid_MD = valid_M[:, None] & (offset_D < HEAD_DIM)[None, :]
    out_MD = out_ptr + place_M[:, None] * HEAD_DIM + offset_D[None, :]
    if active == 1:
        tl.store(out_MD, result_MD.to(out_ptr.dtype.element_ty), mask=valid_MD)
    if SPLIT:  # noqa: SIM102 - what is constant must stand alone
        if active > 1:
            tl.store(part_ptr + (part_place_M + part)[:, None] * HEAD_DIM + offset_D[None, :], result_MD, mask=valid_MD)
            tl.store(lse_ptr + part_place_M + part, lse_M, mask=valid_M)
            tl.debug_barrier()  # every thread's part is written before the program counts as arrived
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == active - 1:
                tl.store(counter_ptr, 0)
                joined_MD = _join(
                    *(part_ptr, lse_ptr, part_place_M, valid_M, active, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_C)
                )
                tl.store(out_MD, joined_MD.to(out_ptr.dtype.element_ty), mask=valid_MD)


@triton.jit
def _join(
    part_ptr,
    lse_ptr,
    part_place_M,
    valid_M,
    active,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The mean of the parts [M, D], weighted by 2 ** log2-sum. Others wrote them just now: read past the nearest cache."""
    UNROLL: tl.constexpr = 4 if BLOCK_M <= 16 else 1  # loads of small parts are under way together
    offset_C = tl.arange(0, BLOCK_C)
    offset_D = tl.arange(0, BLOCK_D)
    lse_MC = tl.load(
        lse_ptr + part_place_M[:, None] + offset_C[None, :],
        mask=valid_M[:, None] & (offset_C < active)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top_M = tl.max(lse_MC, 1)
    top_M = tl.where(top_M == float("-inf"), 0.0, top_M)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, active, UNROLL):
        for step in tl.static_range(UNROLL):
            there_M = valid_M & (start + step < active)
            place_M = part_place_M + start + step
            lse_M = tl.load(lse_ptr + place_M, mask=there_M, other=float("-inf"), cache_modifier=".cg")
            part_MD = tl.load(
                part_ptr + place_M[:, None] * HEAD_DIM + offset_D[None, :],
                mask=there_M[:, None] & (offset_D < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weight_M = tl.exp2(lse_M - top_M)
            acc_MD += part_MD * weight_M[:, None]
            sum_M += weight_M
    return acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@triton.jit(do_not_specialize=["first", "num_rows", "num_parts", "shortest_part", "stride_table"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    arrived_ptr,
    query_start_ptr,
    context_lens_ptr,
    page_table_ptr,
    stride_token,
    stride_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    scale_log2,
    first,
    num_rows,
    num_parts,
    shortest_part,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    IEEE: tl.constexpr,
):
    """One tile of queries of one kv head over one part of its context.

    Grid (query blocks, K, parts). Rows and tokens start at `first`. Writes `out` [T, H, D]. With SPLIT parts [T, H, C, D] and their
    log2-sums [T, H, C], both counted from `first`, pass through memory; `arrived` [query blocks, K] counts them.
    """
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // GROUP
    if DECODE:
        row = tl.program_id(0)
        query_len = 1
        query = 0
    else:
        # later blocks of a row see more keys: they go first, so that short ones fill the end of the launch
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
    offset_D = tl.arange(0, BLOCK_D)
    query_M = offset_M // GROUP
    head_M = kv_head * GROUP + offset_M % GROUP
    valid_M = (query_M < BLOCK_Q) & (query + query_M < query_len)
    valid_MD = valid_M[:, None] & (offset_D < HEAD_DIM)[None, :]
    position_M = first_position + query_M

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
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    q_place_MD = (
        (token + query_M).to(tl.int64)[:, None] * stride_token + head_M[:, None] * stride_head + offset_D[None, :]
    )
    q_MD = tl.load(q_ptr + q_place_MD, mask=valid_MD, other=0.0)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    # keys up to the tile's first position are seen by all its queries; whole tiles of those need no mask
    middle = tl.maximum(begin, tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N)
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
    # a row without any key (padding, or a part behind a query) gives 0, not 0 / 0; NaN passes
    divisor_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    place_M = ((token + query_M) * (KV_HEADS * GROUP) + head_M).to(tl.int64)
    part_place_M = ((token - first + query_M) * (KV_HEADS * GROUP) + head_M).to(tl.int64) * num_parts
    finish_part(
        *(acc_MD / divisor_M[:, None], max_M + tl.log2(divisor_M), place_M, part_place_M, valid_M, part, active),
        *(out_ptr, part_ptr, lse_ptr, arrived_ptr + tl.program_id(0) * KV_HEADS + kv_head),
        *(HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_C, SPLIT),
    )


@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    write_index_ptr,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_slot,
    stride_kv_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one token's keys and values [K, D] to its place in the pages. Grid (T,)."""
    token = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    inside = offset < KV_HEADS * HEAD_DIM
    head = offset // HEAD_DIM
    dim = offset % HEAD_DIM
    place = tl.load(write_index_ptr + token) * stride_slot + head * stride_kv_head + dim
    k = tl.load(k_ptr + token.to(tl.int64) * stride_k_token + head * stride_k_head + dim, mask=inside)
    v = tl.load(v_ptr + token.to(tl.int64) * stride_v_token + head * stride_v_head + dim, mask=inside)
    tl.store(k_cache_ptr + place, k, mask=inside)
    tl.store(v_cache_ptr + place, v, mask=inside)
