"""Triton kernels of matrix products whose time is that of reading the weight: few tokens, each weight read once.

Owns what runs on the device; tiles and grids are the caller's (ops/linear_triton.py). Two kernels compute, with float32
sums, one of four products of x [T, K] and weight [N, K]: plain; of the RMS-normalised x (NORM); silu(gate) * up of a
weight [2 N, K] (GATED); added to a residual (RESIDUAL). The norm costs no pass of its own: its factor is the same for
the whole row, so it is applied to the finished sums.

Shape suffixes, of one program: T tokens, N output features, K input features.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _load_weight(ptrs, inside, EVEN: tl.constexpr):
    """A tile that is read once. EVEN: all of it is inside."""
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    return tl.load(ptrs, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_product(total, x_TK, weight_NK, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """total [N, T] + weight @ x^T, or total [T, N] + x @ weight^T."""
    if WEIGHT_FIRST:
        total = tl.dot(weight_NK, tl.trans(x_TK), total, input_precision=PRECISION)
    else:
        total = tl.dot(x_TK, tl.trans(weight_NK), total, input_precision=PRECISION)
    return total


@triton.jit
def _gate(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up, rounded after each operation as if these were separate."""
    gate = gate.to(DTYPE).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32)
    return active * up.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    T,
    N,
    K,
    stride_x,
    stride_residual,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply and add on the general units: for one token, or very few. Grid (blocks of N,).

    Every tensor of the loop has the three dimensions T, N, K, one of them 1: so all have one layout, and none is moved
    between threads before the sum at the end.
    """
    first = tl.program_id(0) * BLOCK_N
    second_part = tl.cast(N, tl.int64) * K
    t_T11 = tl.arange(0, BLOCK_T)[:, None, None]
    n_1N1 = first + tl.arange(0, BLOCK_N)[None, :, None]
    x_ptrs = x_ptr + t_T11 * stride_x
    weight_ptrs = weight_ptr + n_1N1.to(tl.int64) * K
    total_TNK = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    up_TNK = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    squares_T1K = tl.zeros([BLOCK_T, 1, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_11K = start + tl.arange(0, BLOCK_K)[None, None, :]
        inside_1NK = (n_1N1 < N) & (k_11K < K)
        weight_1NK = _load_weight(weight_ptrs + k_11K, inside_1NK, EVEN)
        if GATED:
            second_1NK = _load_weight(weight_ptrs + second_part + k_11K, inside_1NK, EVEN)
        x_T1K = tl.load(x_ptrs + k_11K, mask=(t_T11 < T) & (k_11K < K), other=0.0).to(tl.float32)
        if NORM:
            squares_T1K += x_T1K * x_T1K
            x_T1K *= tl.load(norm_ptr + k_11K, mask=k_11K < K, other=0.0).to(tl.float32)
        total_TNK += x_T1K * weight_1NK.to(tl.float32)
        if GATED:
            up_TNK += x_T1K * second_1NK.to(tl.float32)
    out_TN = tl.sum(total_TNK, axis=2)
    up_TN = out_TN
    if GATED:
        up_TN = tl.sum(up_TNK, axis=2)
    if NORM:
        factor_T1 = tl.rsqrt(tl.sum(squares_T1K, axis=2) / K + eps)
        out_TN *= factor_T1
        up_TN *= factor_T1
    _finish(
        *(out_TN, up_TN, residual_ptr, out_ptr, first, T, N, stride_residual),
        *(GATED, RESIDUAL, BLOCK_T, BLOCK_N),
    )


@triton.jit(do_not_specialize=["T"])
def tiles_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    T,
    N,
    K,
    stride_x,
    stride_residual,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    IEEE: tl.constexpr,
):
    """On the matrix units: for a few dozen tokens at most. Grid (blocks of N,); one block holds all tokens.

    WEIGHT_FIRST makes the weight the left operand, whose rows Hopper's units take 64 at a time; otherwise tokens are,
    and warps share out the weight's rows.
    """
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if IEEE else None
    first = tl.program_id(0) * BLOCK_N
    second_part = tl.cast(N, tl.int64) * K
    t_T1 = tl.arange(0, BLOCK_T)[:, None]
    n_N1 = first + tl.arange(0, BLOCK_N)[:, None]
    x_ptrs = x_ptr + t_T1 * stride_x
    weight_ptrs = weight_ptr + n_N1.to(tl.int64) * K
    rows: tl.constexpr = BLOCK_N if WEIGHT_FIRST else BLOCK_T
    columns: tl.constexpr = BLOCK_T if WEIGHT_FIRST else BLOCK_N
    total = tl.zeros([rows, columns], tl.float32)
    up = tl.zeros([rows, columns], tl.float32)
    squares_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_1K = start + tl.arange(0, BLOCK_K)[None, :]
        inside_NK = (n_N1 < N) & (k_1K < K)
        weight_NK = _load_weight(weight_ptrs + k_1K, inside_NK, EVEN)
        if GATED:
            second_NK = _load_weight(weight_ptrs + second_part + k_1K, inside_NK, EVEN)
        x_TK = tl.load(x_ptrs + k_1K, mask=(t_T1 < T) & (k_1K < K), other=0.0)
        if NORM:
            float_TK = x_TK.to(tl.float32)
            squares_TK += float_TK * float_TK
            x_TK = (float_TK * tl.load(norm_ptr + k_1K, mask=k_1K < K, other=0.0).to(tl.float32)).to(DTYPE)
        total = _add_product(total, x_TK, weight_NK, WEIGHT_FIRST, PRECISION)
        if GATED:
            up = _add_product(up, x_TK, second_NK, WEIGHT_FIRST, PRECISION)
    if WEIGHT_FIRST:
        total = tl.trans(total)
        up = tl.trans(up)
    if NORM:
        factor_T1 = tl.rsqrt(tl.sum(squares_TK, axis=1) / K + eps)[:, None]
        total *= factor_T1
        up *= factor_T1
    _finish(
        *(total, up, residual_ptr, out_ptr, first, T, N, stride_residual),
        *(GATED, RESIDUAL, BLOCK_T, BLOCK_N),
    )


@triton.jit
def _finish(
    out_TN,
    up_TN,
    residual_ptr,
    out_ptr,
    first,
    T,
    N,
    stride_residual,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Activation or residual, and the store."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    t_T1 = tl.arange(0, BLOCK_T)[:, None]
    n_1N = first + tl.arange(0, BLOCK_N)[None, :]
    inside_TN = (t_T1 < T) & (n_1N < N)
    if GATED:
        out_TN = _gate(out_TN, up_TN, DTYPE)
    if RESIDUAL:
        residual_TN = tl.load(residual_ptr + t_T1 * stride_residual + n_1N, mask=inside_TN, other=0.0)
        out_TN = out_TN.to(DTYPE).to(tl.float32) + residual_TN.to(tl.float32)
    tl.store(out_ptr + t_T1.to(tl.int64) * N + n_1N, out_TN.to(DTYPE), mask=inside_TN)
