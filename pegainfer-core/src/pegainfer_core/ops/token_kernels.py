"""Triton kernels of work on each token by itself: norm, activation, query and key heads, the arg max of logits, draws.

Owns what runs on the device; launches are the caller's (ops/token_triton.py). Results are rounded where the plain
implementations round them, so that both give the same bits but for the order of sums.

Shape suffixes: E hidden size, F intermediate size; of one program: H heads, N half of a head, V ids, C chunks of V.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    E,
    stride_x,
    stride_residual,
    eps,
    ADD: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """RMS norm of x, or (ADD) of x + residual, which is stored too. Grid (tokens,)."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    offset_E = tl.arange(0, BLOCK_E)
    inside_E = offset_E < E
    weight_E = tl.load(weight_ptr + offset_E, mask=inside_E, other=0.0).to(tl.float32)
    x_ptr += token * stride_x
    x_E = tl.load(x_ptr + offset_E, mask=inside_E, other=0.0).to(tl.float32)
    if ADD:
        residual_E = tl.load(residual_ptr + token * stride_residual + offset_E, mask=inside_E, other=0.0)
        x_E = (x_E + residual_E.to(tl.float32)).to(DTYPE)
        tl.store(sum_ptr + token * E + offset_E, x_E, mask=inside_E)
        x_E = x_E.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x_E * x_E) / E + eps)
    normed_E = (x_E * factor).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight_E
    tl.store(out_ptr + token * E + offset_E, normed_E.to(DTYPE), mask=inside_E)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    F,
    stride_token,
    BLOCK_F: tl.constexpr,
):
    """silu(gate) * up of rows [gate, up]. Grid (tokens, blocks of F)."""
    DTYPE: tl.constexpr = gate_up_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    offset_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = offset_F < F
    gate_ptr = gate_up_ptr + token * stride_token
    gate_F = tl.load(gate_ptr + offset_F, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_ptr + F + offset_F, mask=inside_F, other=0.0).to(tl.float32)
    active_F = (gate_F * tl.sigmoid(gate_F)).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + token * F + offset_F, (active_F * up_F).to(DTYPE), mask=inside_F)


@triton.jit
def sigmoid_mul_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    F,
    stride_x,
    stride_gate,
    BLOCK_F: tl.constexpr,
):
    """x * sigmoid(gate). Grid (tokens, blocks of F)."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    offset_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = offset_F < F
    x_F = tl.load(x_ptr + token * stride_x + offset_F, mask=inside_F, other=0.0).to(tl.float32)
    gate_F = tl.load(gate_ptr + token * stride_gate + offset_F, mask=inside_F, other=0.0).to(tl.float32)
    gated_F = x_F * tl.sigmoid(gate_F).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + token * F + offset_F, gated_F.to(DTYPE), mask=inside_F)


@triton.jit
def _normed(first_HN, second_HN, query_H, query_weight_ptr, key_weight_ptr, offset_N, HALF, eps, DTYPE: tl.constexpr):
    """Both halves of each head after the RMS norm with the weight of queries or of keys: in its type, then in DTYPE."""
    WEIGHT_DTYPE: tl.constexpr = query_weight_ptr.dtype.element_ty
    inside_N = offset_N < HALF
    squares_H = tl.sum(first_HN * first_HN, axis=1) + tl.sum(second_HN * second_HN, axis=1)
    factor_H1 = tl.rsqrt(squares_H / (2 * HALF) + eps)[:, None]
    query_first_N = tl.load(query_weight_ptr + offset_N, mask=inside_N, other=0.0).to(tl.float32)
    query_second_N = tl.load(query_weight_ptr + HALF + offset_N, mask=inside_N, other=0.0).to(tl.float32)
    key_first_N = tl.load(key_weight_ptr + offset_N, mask=inside_N, other=0.0).to(tl.float32)
    key_second_N = tl.load(key_weight_ptr + HALF + offset_N, mask=inside_N, other=0.0).to(tl.float32)
    query_H1 = query_H[:, None]
    first_weight_HN = tl.where(query_H1, query_first_N[None, :], key_first_N[None, :])
    second_weight_HN = tl.where(query_H1, query_second_N[None, :], key_second_N[None, :])
    first_HN = (first_HN * factor_H1).to(WEIGHT_DTYPE).to(tl.float32) * first_weight_HN
    second_HN = (second_HN * factor_H1).to(WEIGHT_DTYPE).to(tl.float32) * second_weight_HN
    return first_HN.to(DTYPE).to(tl.float32), second_HN.to(DTYPE).to(tl.float32)


@triton.jit
def heads_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    write_index_ptr,
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    stride_token,
    stride_slot,
    stride_kv_head,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Norm (NORM) and rotation of query and key heads; queries to their tensor, keys and values to their pages.

    Grid (tokens, blocks of all heads).
    """
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    query_H = head_H < HEADS
    rotated_H1 = (head_H < HEADS + KV_HEADS)[:, None]
    offset_N = tl.arange(0, BLOCK_N)
    inside_N = offset_N < HALF
    inside_HN = (head_H < HEADS + 2 * KV_HEADS)[:, None] & inside_N[None, :]
    source_HN = token * stride_token + head_H[:, None] * (2 * HALF) + offset_N[None, :]
    given_first_HN = tl.load(qkv_ptr + source_HN, mask=inside_HN, other=0.0)
    given_second_HN = tl.load(qkv_ptr + source_HN + HALF, mask=inside_HN, other=0.0)
    first_HN = given_first_HN.to(tl.float32)
    second_HN = given_second_HN.to(tl.float32)
    if NORM:
        first_HN, second_HN = _normed(
            *(first_HN, second_HN, query_H, query_weight_ptr, key_weight_ptr, offset_N, HALF, eps, DTYPE)
        )
    place = tl.load(write_index_ptr + token) * stride_slot
    angle_N = tl.load(position_ptr + token) * HALF + offset_N
    cos_1N = tl.load(cos_ptr + angle_N, mask=inside_N, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    sin_1N = tl.load(sin_ptr + angle_N, mask=inside_N, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    turned_first_HN = (first_HN * cos_1N).to(DTYPE).to(tl.float32) - (second_HN * sin_1N).to(DTYPE).to(tl.float32)
    turned_second_HN = (second_HN * cos_1N).to(DTYPE).to(tl.float32) + (first_HN * sin_1N).to(DTYPE).to(tl.float32)
    first_HN = tl.where(rotated_H1, turned_first_HN.to(DTYPE), given_first_HN)
    second_HN = tl.where(rotated_H1, turned_second_HN.to(DTYPE), given_second_HN)

    query_HN = (token * HEADS + head_H[:, None]) * (2 * HALF) + offset_N[None, :]
    mask_HN = inside_HN & query_H[:, None]
    tl.store(query_ptr + query_HN, first_HN, mask=mask_HN)
    tl.store(query_ptr + query_HN + HALF, second_HN, mask=mask_HN)
    key_HN = place + (head_H - HEADS)[:, None] * stride_kv_head + offset_N[None, :]
    mask_HN = inside_HN & rotated_H1 & (head_H >= HEADS)[:, None]
    tl.store(k_cache_ptr + key_HN, first_HN, mask=mask_HN)
    tl.store(k_cache_ptr + key_HN + HALF, second_HN, mask=mask_HN)
    value_HN = place + (head_H - HEADS - KV_HEADS)[:, None] * stride_kv_head + offset_N[None, :]
    mask_HN = inside_HN & (head_H >= HEADS + KV_HEADS)[:, None]
    tl.store(v_cache_ptr + value_HN, first_HN, mask=mask_HN)
    tl.store(v_cache_ptr + value_HN + HALF, second_HN, mask=mask_HN)


@triton.jit
def arg_max_parts_kernel(
    logits_ptr,
    best_ptr,
    id_ptr,
    vocab_size,
    stride_row,
    num_parts,
    BLOCK_V: tl.constexpr,
):
    """The largest of BLOCK_V logits and the lowest id that has it; NaN in the place of the largest if there is any.

    Grid (rows, parts).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    id_V = part * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_V = id_V < vocab_size
    logit_V = tl.load(logits_ptr + row * stride_row + id_V, mask=inside_V, other=float("-inf")).to(tl.float32)
    broken = tl.max((logit_V != logit_V).to(tl.int32), axis=0)
    logit_V = tl.where(logit_V != logit_V, float("-inf"), logit_V)
    best = tl.max(logit_V, axis=0)
    # an id inside the vocabulary even where nothing is finite
    best_id = tl.min(tl.where((logit_V == best) & inside_V, id_V, vocab_size - 1), axis=0)
    tl.store(best_ptr + row * num_parts + part, tl.where(broken > 0, float("nan"), best))
    tl.store(id_ptr + row * num_parts + part, best_id)


@triton.jit
def arg_max_kernel(
    best_ptr,
    id_ptr,
    token_id_ptr,
    finite_ptr,
    num_parts,
    vocab_size,
    BLOCK_C: tl.constexpr,
):
    """Join the parts of a row: the arg max, and 1 where the largest logit is finite. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    offset_C = tl.arange(0, BLOCK_C)
    inside_C = offset_C < num_parts
    best_C = tl.load(best_ptr + row * num_parts + offset_C, mask=inside_C, other=float("-inf"))
    id_C = tl.load(id_ptr + row * num_parts + offset_C, mask=inside_C, other=vocab_size - 1)
    broken = tl.max((best_C != best_C).to(tl.int32), axis=0)
    best_C = tl.where(best_C != best_C, float("-inf"), best_C)
    best = tl.max(best_C, axis=0)
    token_id = tl.min(tl.where(best_C == best, id_C, vocab_size - 1), axis=0)
    finite = (broken == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.store(token_id_ptr + row, token_id.to(tl.int64))
    tl.store(finite_ptr + row, finite.to(tl.int64))


@triton.jit
def draw_parts_kernel(
    logits_ptr,
    key_ptr,
    best_ptr,
    id_ptr,
    vocab_size,
    stride_row,
    num_parts,
    BLOCK_V: tl.constexpr,
):
    """The largest of BLOCK_V logits plus Gumbel noise, float64, and the lowest id that has it. Grid (rows, parts).

    The noise is a pure function of the row's key and the id: SplitMix64's finaliser, as in ops/sampling.py.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    id_V = part * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_V = id_V < vocab_size
    logit_V = tl.load(logits_ptr + row * stride_row + id_V, mask=inside_V, other=float("-inf")).to(tl.float64)
    # the odd constants as signed numbers; products wrap around
    x_V = tl.load(key_ptr + row) + id_V.to(tl.int64) * -7046029254386353131
    x_V = (x_V ^ _shift_right(x_V, 30)) * -4658895280553007687
    x_V = (x_V ^ _shift_right(x_V, 27)) * -7723592293110705685
    bits_V = _shift_right(x_V ^ _shift_right(x_V, 31), 32)
    value_V = logit_V - tl.log(-tl.log((bits_V.to(tl.float64) + 0.5) * 2.3283064365386963e-10))
    best = tl.max(value_V, axis=0)
    best_id = tl.min(tl.where((value_V == best) & inside_V, id_V, vocab_size - 1), axis=0)
    tl.store(best_ptr + row * num_parts + part, best)
    tl.store(id_ptr + row * num_parts + part, best_id)


@triton.jit
def _shift_right(x, bits: tl.constexpr):
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def draw_kernel(best_ptr, id_ptr, token_id_ptr, num_parts, vocab_size, BLOCK_C: tl.constexpr):
    """Join the parts of a row: the id of the largest value. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    offset_C = tl.arange(0, BLOCK_C)
    inside_C = offset_C < num_parts
    best_C = tl.load(best_ptr + row * num_parts + offset_C, mask=inside_C, other=float("-inf"))
    id_C = tl.load(id_ptr + row * num_parts + offset_C, mask=inside_C, other=vocab_size - 1)
    best = tl.max(best_C, axis=0)
    token_id = tl.min(tl.where(best_C == best, id_C, vocab_size - 1), axis=0)
    tl.store(token_id_ptr + row, token_id.to(tl.int64))
