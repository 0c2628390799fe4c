"""Triton kernels of gated DeltaNet: one for rows of one token, four for prompts in chunks.

Owns what runs on the device; launches are the caller's (ops/gdn_triton.py), the plain implementation in ops/gdn_torch.py
says what is computed. Nothing waits for the device or depends on lengths that only the device knows, but through masks.

Shape suffixes of one program: B tokens of a chunk (J the same, as columns), K key dim, V value dim or a block of it,
R prompt rows, H a block of value heads.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# of queries and keys; ops/gdn.py's L2_EPS
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _gates(a, b, log_a, bias):
    """(g, beta); see gdn_torch.gates."""
    raised = a + bias
    softplus = tl.maximum(raised, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raised)))
    return -tl.exp(log_a) * softplus, tl.sigmoid(b)


@triton.jit
def _convolved_token(x_ptr, ring_ptr, weight_ptr, channel_X, position, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """silu of the convolution at one position; x_ptr is that token's row, ring_ptr the slot's latest inputs."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    newest_X = tl.load(weight_ptr + channel_X * TAPS + (TAPS - 1)).to(tl.float32)
    sum_X = newest_X * tl.load(x_ptr + channel_X).to(tl.float32)
    for back in tl.static_range(1, TAPS):
        weight_X = tl.load(weight_ptr + channel_X * TAPS + (TAPS - 1 - back)).to(tl.float32)
        place = (position - back + TAPS) % TAPS
        input_X = tl.load(ring_ptr + place * CHANNELS + channel_X, mask=channel_X * 0 + position >= back, other=0.0)
        sum_X += weight_X * input_X.to(tl.float32)
    return _silu(sum_X.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def step_kernel(
    x_ptr,
    weight_ptr,
    log_a_ptr,
    bias_ptr,
    norm_ptr,
    ring_ptr,
    state_ptr,
    slot_ptr,
    fresh_ptr,
    position_ptr,
    out_ptr,
    stride_x,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The whole layer for one token of one value head: convolution, gates, state, norm. Grid (rows, heads)."""
    KEYS: tl.constexpr = HEADS // GROUP * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offset_K = tl.arange(0, KEY_DIM)
    slot = tl.load(slot_ptr + row)
    position = tl.load(position_ptr + row).to(tl.int32)
    fresh = tl.load(fresh_ptr + row)
    x_ptr += row * stride_x
    out_ptr += (row * HEADS + head) * VALUE_DIM
    ring_ptr += slot * (TAPS * CHANNELS)
    state_ptr += (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
    # programs of a group read the same keys: none reads the place that is written
    place_ptr = ring_ptr + position % TAPS * CHANNELS
    query_K = head // GROUP * KEY_DIM + offset_K
    q_K = _convolved_token(x_ptr, ring_ptr, weight_ptr, query_K, position, CHANNELS, TAPS)
    k_K = _convolved_token(x_ptr, ring_ptr, weight_ptr, query_K + KEYS, position, CHANNELS, TAPS)
    q_K *= tl.rsqrt(tl.sum(q_K * q_K) + L2_EPS) * (KEY_DIM**-0.5)
    k_K *= tl.rsqrt(tl.sum(k_K * k_K) + L2_EPS)
    first_K = (offset_K >= 0) & (head % GROUP == 0)
    tl.store(place_ptr + query_K, tl.load(x_ptr + query_K), mask=first_K)
    tl.store(place_ptr + KEYS + query_K, tl.load(x_ptr + KEYS + query_K), mask=first_K)
    b = tl.load(x_ptr + CHANNELS + HEADS * VALUE_DIM + head).to(tl.float32)
    a = tl.load(x_ptr + CHANNELS + HEADS * VALUE_DIM + HEADS + head).to(tl.float32)
    g, beta = _gates(a, b, tl.load(log_a_ptr + head), tl.load(bias_ptr + head))
    kept = tl.exp(g)
    product = tl.sum(q_K * k_K)

    squares = 0.0
    for block in tl.static_range(VALUE_DIM // BLOCK_V):
        offset_V = block * BLOCK_V + tl.arange(0, BLOCK_V)
        value_V = 2 * KEYS + head * VALUE_DIM + offset_V
        v_V = _convolved_token(x_ptr, ring_ptr, weight_ptr, value_V, position, CHANNELS, TAPS)
        tl.store(place_ptr + value_V, tl.load(x_ptr + value_V))
        place_KV = offset_K[:, None] * VALUE_DIM + offset_V[None, :]
        state_KV = tl.load(state_ptr + place_KV, mask=(place_KV >= 0) & (fresh == 0), other=0.0) * kept
        # both sums over the old state at once: (new state)^T q = (old state)^T q + (k . q) change
        foreseen_V = tl.sum(state_KV * k_K[:, None], axis=0)
        read_V = tl.sum(state_KV * q_K[:, None], axis=0)
        change_V = beta * (v_V - foreseen_V)
        tl.store(state_ptr + place_KV, state_KV + k_K[:, None] * change_V[None, :])
        out_V = (read_V + product * change_V).to(DTYPE)
        squares += tl.sum(out_V.to(tl.float32) * out_V.to(tl.float32))
        tl.store(out_ptr + offset_V, out_V)
    tl.debug_barrier()
    offset_V = tl.arange(0, VALUE_DIM)
    out_V = tl.load(out_ptr + offset_V).to(tl.float32)
    z_V = tl.load(x_ptr + CHANNELS + head * VALUE_DIM + offset_V).to(tl.float32)
    normed_V = out_V * tl.rsqrt(squares / VALUE_DIM + eps) * tl.load(norm_ptr + offset_V)
    tl.debug_barrier()
    tl.store(out_ptr + offset_V, (normed_V * _silu(z_V)).to(DTYPE))


@triton.jit
def _find_chunk(query_start_ptr, first_row, num_rows, chunk, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """(row, chunk of that row) of the step's chunk of this number; the row is first_row + num_rows past the last one."""
    offset_R = tl.arange(0, BLOCK_R)
    inside_R = offset_R < num_rows
    start_R = tl.load(query_start_ptr + first_row + offset_R, mask=inside_R, other=0)
    end_R = tl.load(query_start_ptr + first_row + offset_R + 1, mask=inside_R, other=0)
    last_R = tl.cumsum((end_R - start_R + CHUNK - 1) // CHUNK, axis=0)
    passed_R = inside_R & (last_R <= chunk)
    before = tl.max(tl.where(passed_R, last_R, 0), axis=0)
    return first_row + tl.sum(passed_R.to(tl.int32), axis=0), chunk - before


@triton.jit
def _convolved_chunk(
    x_ptr,
    stride_x,
    ring_ptr,
    weight_ptr,
    channel_X,
    row_B,
    before,
    left,
    position,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """silu of the convolution at a chunk's tokens, [B, X]; zeros past the `left` ones.

    x_ptr is the chunk's first token, at `position`; the row has `before` tokens in this step before it.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inside_B = row_B < left
    channel_1X = channel_X[None, :]
    sum_BX = tl.zeros((row_B.shape[0], channel_X.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source_B = row_B + (tap - (TAPS - 1))
        here_B1 = (inside_B & (source_B >= -before))[:, None]
        weight_1X = tl.load(weight_ptr + channel_1X * TAPS + tap).to(tl.float32)
        input_BX = tl.load(x_ptr + (source_B[:, None] * stride_x + channel_1X), mask=here_B1, other=0.0)
        sum_BX += input_BX.to(tl.float32) * weight_1X
        if tap < TAPS - 1:
            old_B1 = (inside_B & (source_B < -before) & (source_B >= -position))[:, None]
            place_B1 = ((position + TAPS + source_B) % TAPS)[:, None] * CHANNELS
            old_BX = tl.load(ring_ptr + (place_B1 + channel_1X), mask=old_B1, other=0.0)
            sum_BX += old_BX.to(tl.float32) * weight_1X
    return _silu(sum_BX.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def convolve_kernel(
    x_ptr,
    weight_ptr,
    ring_ptr,
    slot_ptr,
    query_start_ptr,
    position_ptr,
    out_ptr,
    stride_x,
    first_row,
    num_rows,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Queries (of length 1, scaled), keys (of length 1) and values of prompt rows, [tokens, channels].

    Grid (chunks, query and key and value heads).
    """
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row, chunk = _find_chunk(query_start_ptr, first_row, num_rows, tl.program_id(0), CHUNK, BLOCK_R)
    if row >= first_row + num_rows:
        return
    before = chunk * CHUNK
    start = tl.load(query_start_ptr + row).to(tl.int64)
    left = tl.load(query_start_ptr + row + 1) - start.to(tl.int32) - before
    start += before
    position = tl.load(position_ptr + start).to(tl.int32)
    ring_ptr += tl.load(slot_ptr + row) * (TAPS * CHANNELS)
    x_ptr += start * stride_x
    # each decode row before the prompt rows has one token
    out_ptr += (start - first_row) * CHANNELS
    row_B = tl.arange(0, CHUNK)
    head = tl.program_id(1)
    if head < 2 * KEY_HEADS:
        channel_K = head * KEY_DIM + tl.arange(0, KEY_DIM)
        x_BK = _convolved_chunk(
            x_ptr, stride_x, ring_ptr, weight_ptr, channel_K, row_B, before, left, position, CHANNELS, TAPS
        )
        scale = tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
        x_BK *= (tl.rsqrt(tl.sum(x_BK * x_BK, axis=1) + L2_EPS) * scale)[:, None]
        place_BK = row_B[:, None] * CHANNELS + channel_K[None, :]
        tl.store(out_ptr + place_BK, x_BK.to(DTYPE), mask=row_B[:, None] < left)
    else:
        channel_V = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        x_BV = _convolved_chunk(
            x_ptr, stride_x, ring_ptr, weight_ptr, channel_V, row_B, before, left, position, CHANNELS, TAPS
        )
        place_BV = row_B[:, None] * CHANNELS + channel_V[None, :]
        tl.store(out_ptr + place_BV, x_BV.to(DTYPE), mask=row_B[:, None] < left)


@triton.jit
def _inverse(below_BJ, row_B, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + below)^-1 of a strictly lower triangular matrix: inverses of blocks, of 2 rows first, joined two by two.

    [[P, 0], [L, Q]]^-1 is [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]: as stable as substitution, unlike powers of the matrix.
    """
    row_B1 = row_B[:, None]
    row_1J = row_B[None, :]
    inverse_BJ = tl.where(row_B1 == row_1J, 1.0, 0.0) - tl.where(row_B1 // 2 == row_1J // 2, below_BJ, 0.0)
    for level in tl.static_range(1, LEVELS):
        joined = ((row_B1 >> (level + 1)) == (row_1J >> (level + 1))) & ((row_B1 >> level) != (row_1J >> level))
        corner_BJ = tl.where(joined, below_BJ, 0.0)
        left_BJ = tl.dot(inverse_BJ, corner_BJ, input_precision=PRECISION)
        inverse_BJ -= tl.dot(left_BJ, inverse_BJ, input_precision=PRECISION)
    return inverse_BJ


@triton.jit
def prepare_kernel(
    gate_ptr,
    log_a_ptr,
    bias_ptr,
    query_start_ptr,
    mixed_ptr,
    reader_ptr,
    change_ptr,
    query_ptr,
    key_ptr,
    within_ptr,
    sum_ptr,
    stride_gate,
    first_row,
    num_rows,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOTS: tl.constexpr,
    SOLVE: tl.constexpr,
):
    """What a chunk of one value head is without the state before it; see gdn_torch.chunked. Grid (chunks, heads).

    Outputs, [tokens, heads, ...]: readers of the state, changes, queries and keys with their decays, products of queries
    and keys with theirs, and the sums of g since the chunk's start (float32).
    """
    KEYS: tl.constexpr = HEADS // GROUP * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    DTYPE: tl.constexpr = mixed_ptr.dtype.element_ty
    head = tl.program_id(1)
    row, chunk = _find_chunk(query_start_ptr, first_row, num_rows, tl.program_id(0), CHUNK, BLOCK_R)
    if row >= first_row + num_rows:
        return
    start = tl.load(query_start_ptr + row).to(tl.int64)
    left = tl.load(query_start_ptr + row + 1) - start.to(tl.int32) - chunk * CHUNK
    start += chunk * CHUNK
    token = start - first_row  # among the prompt tokens: each decode row before them has one
    mixed_ptr += token * CHANNELS
    place = token * HEADS + head
    row_B = tl.arange(0, CHUNK)
    offset_K = tl.arange(0, KEY_DIM)
    offset_V = tl.arange(0, VALUE_DIM)
    inside_B = row_B < left
    inside_B1 = inside_B[:, None]

    gate_ptr += start * stride_gate + head
    b_B = tl.load(gate_ptr + row_B * stride_gate, mask=inside_B, other=0.0).to(tl.float32)
    a_B = tl.load(gate_ptr + row_B * stride_gate + HEADS, mask=inside_B, other=0.0).to(tl.float32)
    g_B, beta_B = _gates(a_B, b_B, tl.load(log_a_ptr + head), tl.load(bias_ptr + head))
    g_B = tl.where(inside_B, g_B, 0.0)
    beta_B = tl.where(inside_B, beta_B, 0.0)
    sum_B = tl.cumsum(g_B, axis=0)
    total = tl.sum(g_B, axis=0)
    tl.store(sum_ptr + place + row_B * HEADS, sum_B, mask=inside_B)
    not_above_BJ = row_B[:, None] >= row_B[None, :]
    decay_BJ = tl.where(not_above_BJ, tl.exp(tl.where(not_above_BJ, sum_B[:, None] - sum_B[None, :], 0.0)), 0.0)

    place_BK = row_B[:, None] * (HEADS * KEY_DIM) + offset_K[None, :]
    channel_BK = row_B[:, None] * CHANNELS + head // GROUP * KEY_DIM + offset_K[None, :]
    k_BK = tl.load(mixed_ptr + KEYS + channel_BK, mask=inside_B1, other=0.0)
    k_KB = tl.trans(k_BK)
    below_BJ = tl.dot(k_BK, k_KB, input_precision=DOTS) * decay_BJ * beta_B[:, None]
    below_BJ = tl.where(row_B[:, None] > row_B[None, :], below_BJ, 0.0)
    inverse_BJ = _inverse(below_BJ, row_B, CHUNK, LEVELS, SOLVE).to(DTYPE)

    later_BK = k_BK.to(tl.float32) * tl.exp(total - sum_B)[:, None]
    tl.store(key_ptr + place * KEY_DIM + place_BK, later_BK.to(DTYPE), mask=inside_B1)
    written_BK = (k_BK.to(tl.float32) * (beta_B * tl.exp(sum_B))[:, None]).to(DTYPE)
    reader_BK = tl.dot(inverse_BJ, written_BK, input_precision=DOTS)
    tl.store(reader_ptr + place * KEY_DIM + place_BK, reader_BK.to(DTYPE), mask=inside_B1)

    q_BK = tl.load(mixed_ptr + channel_BK, mask=inside_B1, other=0.0)
    within_BJ = tl.dot(q_BK, k_KB, input_precision=DOTS) * decay_BJ
    place_BJ = row_B[:, None] * (HEADS * CHUNK) + row_B[None, :]
    tl.store(within_ptr + place * CHUNK + place_BJ, within_BJ.to(DTYPE), mask=inside_B1)
    q_BK = (q_BK.to(tl.float32) * tl.exp(sum_B)[:, None]).to(DTYPE)
    tl.store(query_ptr + place * KEY_DIM + place_BK, q_BK, mask=inside_B1)

    channel_BV = row_B[:, None] * CHANNELS + 2 * KEYS + head * VALUE_DIM + offset_V[None, :]
    v_BV = tl.load(mixed_ptr + channel_BV, mask=inside_B1, other=0.0).to(tl.float32)
    change_BV = tl.dot(inverse_BJ, (v_BV * beta_B[:, None]).to(DTYPE), input_precision=DOTS)
    place_BV = row_B[:, None] * (HEADS * VALUE_DIM) + offset_V[None, :]
    tl.store(change_ptr + place * VALUE_DIM + place_BV, change_BV.to(DTYPE), mask=inside_B1)


@triton.jit
def _times_state(x_BK, state_KV, DOTS: tl.constexpr):
    """x @ state. A narrow x meets the state in two parts, so that the state keeps 16 bits and more."""
    if x_BK.dtype == tl.float32:
        product_BV = tl.dot(x_BK, state_KV, input_precision=DOTS)
    else:
        high_KV = state_KV.to(x_BK.dtype)
        low_KV = (state_KV - high_KV.to(tl.float32)).to(x_BK.dtype)
        product_BV = tl.dot(x_BK, low_KV, input_precision=DOTS)
        product_BV = tl.dot(x_BK, high_KV, product_BV, input_precision=DOTS)
    return product_BV


@triton.jit
def _keep_inputs(
    x_ptr, stride_x, ring_ptr, channel_X, length, first_position, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """The row's latest inputs of these channels go to the slot."""
    for back in tl.static_range(TAPS):
        token = length - 1 - back
        mask_X = channel_X * 0 + token >= 0
        input_X = tl.load(x_ptr + token * stride_x + channel_X, mask=mask_X, other=0.0)
        place = (first_position + token + TAPS) % TAPS
        tl.store(ring_ptr + place * CHANNELS + channel_X, input_X, mask=mask_X)


@triton.jit
def scan_kernel(
    x_ptr,
    ring_ptr,
    state_ptr,
    slot_ptr,
    fresh_ptr,
    query_start_ptr,
    position_ptr,
    reader_ptr,
    change_ptr,
    query_ptr,
    key_ptr,
    within_ptr,
    sum_ptr,
    out_ptr,
    stride_x,
    first_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOTS: tl.constexpr,
):
    """The state from chunk to chunk, and the outputs before the norm. Grid (rows, heads, blocks of V).

    The first block of a head leaves the row's latest inputs of the convolution in its slot: convolve_kernel has read
    the old ones by now.
    """
    KEYS: tl.constexpr = HEADS // GROUP * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = tl.load(query_start_ptr + row + 1) - start
    if length == 0:
        return
    slot = tl.load(slot_ptr + row)
    row_B = tl.arange(0, CHUNK)
    offset_K = tl.arange(0, KEY_DIM)
    offset_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    place_KV = offset_K[:, None] * VALUE_DIM + offset_V[None, :]
    state_ptr += (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
    fresh = tl.load(fresh_ptr + row)
    state_KV = tl.load(state_ptr + place_KV, mask=(place_KV >= 0) & (fresh == 0), other=0.0)
    # of a chunk's tokens in the tensors between
    place_BK = row_B[:, None] * (HEADS * KEY_DIM) + offset_K[None, :]
    place_KB = row_B[None, :] * (HEADS * KEY_DIM) + offset_K[:, None]
    place_BV = row_B[:, None] * (HEADS * VALUE_DIM) + offset_V[None, :]
    place_BJ = row_B[:, None] * (HEADS * CHUNK) + row_B[None, :]
    for chunk_start in range(0, length, CHUNK):
        place = (start - first_row + chunk_start) * HEADS + head
        left = length - chunk_start
        inside_B1 = row_B[:, None] < left
        reader_BK = tl.load(reader_ptr + place * KEY_DIM + place_BK, mask=inside_B1, other=0.0)
        change_BV = tl.load(change_ptr + place * VALUE_DIM + place_BV, mask=inside_B1, other=0.0).to(tl.float32)
        query_BK = tl.load(query_ptr + place * KEY_DIM + place_BK, mask=inside_B1, other=0.0)
        key_KB = tl.load(key_ptr + place * KEY_DIM + place_KB, mask=row_B[None, :] < left, other=0.0)
        within_BJ = tl.load(within_ptr + place * CHUNK + place_BJ, mask=inside_B1, other=0.0)
        total = tl.load(sum_ptr + place + (tl.minimum(left, CHUNK) - 1) * HEADS)
        narrow_BV = (change_BV - _times_state(reader_BK, state_KV, DOTS)).to(DTYPE)
        out_BV = _times_state(query_BK, state_KV, DOTS) + tl.dot(within_BJ, narrow_BV, input_precision=DOTS)
        tl.store(out_ptr + place * VALUE_DIM + place_BV, out_BV.to(DTYPE), mask=inside_B1)
        state_KV = state_KV * tl.exp(total) + tl.dot(key_KB, narrow_BV, input_precision=DOTS)
    tl.store(state_ptr + place_KV, state_KV)
    if tl.program_id(2) == 0:
        first_position = tl.load(position_ptr + start)
        x_ptr += start * stride_x
        ring_ptr += slot * (TAPS * CHANNELS)
        value_V = 2 * KEYS + head * VALUE_DIM + tl.arange(0, VALUE_DIM)
        _keep_inputs(x_ptr, stride_x, ring_ptr, value_V, length, first_position, CHANNELS, TAPS)
        if head % GROUP == 0:
            query_K = head // GROUP * KEY_DIM + offset_K
            _keep_inputs(x_ptr, stride_x, ring_ptr, query_K, length, first_position, CHANNELS, TAPS)
            _keep_inputs(x_ptr, stride_x, ring_ptr, query_K + KEYS, length, first_position, CHANNELS, TAPS)


@triton.jit
def gated_norm_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    stride_z,
    eps,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """norm(x) * silu(z) of each head, in x's place. Grid (tokens, blocks of heads)."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offset_V = tl.arange(0, VALUE_DIM)
    place_HV = head_H[:, None] * VALUE_DIM + offset_V[None, :]
    inside_HV = place_HV < HEADS * VALUE_DIM
    x_HV = tl.load(x_ptr + token * (HEADS * VALUE_DIM) + place_HV, mask=inside_HV, other=0.0).to(tl.float32)
    z_HV = tl.load(z_ptr + token * stride_z + place_HV, mask=inside_HV, other=0.0).to(tl.float32)
    factor_H1 = tl.rsqrt(tl.sum(x_HV * x_HV, axis=1) / VALUE_DIM + eps)[:, None]
    normed_HV = x_HV * factor_H1 * tl.load(weight_ptr + offset_V)[None, :] * _silu(z_HV)
    tl.store(x_ptr + token * (HEADS * VALUE_DIM) + place_HV, normed_HV.to(DTYPE), mask=inside_HV)
