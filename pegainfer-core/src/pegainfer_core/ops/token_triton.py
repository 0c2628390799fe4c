"""Norm, activation, heads, arg max and draws through Triton: launches of token_kernels.py.

Owns block sizes and grids. Each function gives what its namesake in norm.py, activation.py, heads.py and sampling.py
gives; those choose. Nothing waits for the device or depends on values, so every launch can be captured.

Shape suffixes: T tokens, E hidden size, F intermediate size, N all heads, H query heads, K key/value heads, D head dim,
P pages, S page size, R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pegainfer_core.ops.token_kernels import (
    arg_max_kernel,
    arg_max_parts_kernel,
    draw_kernel,
    draw_parts_kernel,
    heads_kernel,
    norm_kernel,
    sigmoid_mul_kernel,
    silu_mul_kernel,
)

ARG_MAX_BLOCK = 4096
HEADS_BLOCK = 8


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See norm.rms_norm."""
    return _norm(x_TE, None, weight_E, eps)[0]


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See norm.add_rms_norm."""
    return _norm(x_TE, residual_TE, weight_E, eps)


def _norm(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    tokens, size = x_TE.shape
    out_TE = torch.empty(tokens, size, dtype=x_TE.dtype, device=x_TE.device)
    sum_TE = out_TE if residual_TE is None else torch.empty_like(out_TE)
    residual = x_TE if residual_TE is None else residual_TE
    assert x_TE.stride(1) == 1 and residual.stride(1) == 1, "rows must be dense"
    block = triton.next_power_of_2(size)
    norm_kernel[(tokens,)](
        *(x_TE, residual, weight_E, out_TE, sum_TE),
        *(size, x_TE.stride(0), residual.stride(0), eps),
        ADD=residual_TE is not None,
        BLOCK_E=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out_TE, sum_TE


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """See activation.silu_mul."""
    tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(tokens, size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    block = min(1024, triton.next_power_of_2(size))
    silu_mul_kernel[(tokens, triton.cdiv(size, block))](
        *(gate_up_T2F, out_TF, size, gate_up_T2F.stride(0)),
        BLOCK_F=block,
        num_warps=4,
    )
    return out_TF


def sigmoid_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    """See activation.sigmoid_mul."""
    tokens, size = x_TF.shape
    out_TF = torch.empty(tokens, size, dtype=x_TF.dtype, device=x_TF.device)
    block = min(1024, triton.next_power_of_2(size))
    sigmoid_mul_kernel[(tokens, triton.cdiv(size, block))](
        *(x_TF, gate_TF, out_TF, size, x_TF.stride(0), gate_TF.stride(0)),
        BLOCK_F=block,
        num_warps=4,
    )
    return out_TF


def rotate_and_store(
    qkv_TND: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    tables: tuple[Tensor, Tensor],
    positions_T: Tensor,
    caches: tuple[Tensor, Tensor],
    write_index_T: Tensor,
    out_THD: Tensor | None = None,
) -> Tensor:
    """See heads.rotate_and_store. `norms`: weights of queries and keys, and epsilon; `tables`: cos, sin [C, D / 2].

    The queries go to `out_THD`, dense, if it is given.
    """
    k_cache_PSKD, v_cache_PSKD = caches
    tokens, all_heads, head_dim = qkv_TND.shape
    kv_heads = k_cache_PSKD.shape[2]
    heads = all_heads - 2 * kv_heads
    cos_CN, sin_CN = tables
    assert qkv_TND.stride()[1:] == (head_dim, 1) and cos_CN.is_contiguous() and sin_CN.is_contiguous()
    assert k_cache_PSKD.stride() == v_cache_PSKD.stride() and k_cache_PSKD.stride(3) == 1
    assert k_cache_PSKD.stride(0) == k_cache_PSKD.shape[1] * k_cache_PSKD.stride(1), "slots must be evenly spaced"
    q_THD = out_THD
    if q_THD is None:
        q_THD = torch.empty(tokens, heads, head_dim, dtype=qkv_TND.dtype, device=qkv_TND.device)
    query_weight, key_weight, eps = (q_THD, q_THD, 0.0) if norms is None else norms
    heads_kernel[(tokens, triton.cdiv(all_heads, HEADS_BLOCK))](
        *(qkv_TND, query_weight, key_weight, cos_CN, sin_CN, positions_T, write_index_T),
        *(q_THD, k_cache_PSKD, v_cache_PSKD),
        *(qkv_TND.stride(0), k_cache_PSKD.stride(1), k_cache_PSKD.stride(2), eps),
        NORM=norms is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_H=HEADS_BLOCK,
        BLOCK_N=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return q_THD


def greedy(logits_RV: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """See sampling.greedy."""
    rows, device = logits_RV.shape[0], logits_RV.device
    num_parts = triton.cdiv(vocab_size, ARG_MAX_BLOCK)
    best_RC = torch.empty(rows, num_parts, dtype=torch.float32, device=device)
    id_RC = torch.empty(rows, num_parts, dtype=torch.int32, device=device)
    token_id_R, finite_R = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    arg_max_parts_kernel[(rows, num_parts)](
        *(logits_RV, best_RC, id_RC, vocab_size, logits_RV.stride(0), num_parts),
        BLOCK_V=ARG_MAX_BLOCK,
        num_warps=4,
    )
    arg_max_kernel[(rows,)](
        *(best_RC, id_RC, token_id_R, finite_R, num_parts, vocab_size),
        BLOCK_C=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return token_id_R, finite_R


def sample(scaled_RV: Tensor, key_R: Tensor) -> Tensor:
    """See sampling.sample."""
    rows, vocab_size = scaled_RV.shape
    num_parts = triton.cdiv(vocab_size, ARG_MAX_BLOCK)
    best_RC = torch.empty(rows, num_parts, dtype=torch.float64, device=scaled_RV.device)
    id_RC = torch.empty(rows, num_parts, dtype=torch.int32, device=scaled_RV.device)
    token_id_R = torch.empty(rows, dtype=torch.int64, device=scaled_RV.device)
    draw_parts_kernel[(rows, num_parts)](
        *(scaled_RV, key_R, best_RC, id_RC, vocab_size, scaled_RV.stride(0), num_parts),
        BLOCK_V=ARG_MAX_BLOCK,
        num_warps=4,
    )
    draw_kernel[(rows,)](
        *(best_RC, id_RC, token_id_R, num_parts, vocab_size),
        BLOCK_C=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return token_id_R
