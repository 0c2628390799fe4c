"""From stacked projections to attention's inputs: normalise and rotate query and key heads, store keys and values.

Owns the plain composition and the choice of the fused kernel. Knows no family.

Shape suffixes: T tokens, N all heads (queries, then keys, then values), H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pegainfer_core.ops import token_cpu
from pegainfer_core.ops.attention import Attention, StackedHeads
from pegainfer_core.ops.dispatch import use_cpu, use_triton
from pegainfer_core.ops.norm import RMSNorm
from pegainfer_core.ops.rope import RotaryTable


def rotate_and_attend(
    qkv_TND: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotary: RotaryTable,
    positions_T: Tensor,
    attention: Attention,
    layer: int,
    scale: float | None = None,
) -> Tensor:
    """`rotate_and_store`, then causal attention: [T, H, D]. `scale` defaults to D ** -0.5. qkv is used up."""
    same_eps = norms is None or norms[0].eps == norms[1].eps
    if same_eps and attention.backend.takes_heads and use_triton(qkv_TND):
        heads = StackedHeads(
            qkv_TND=qkv_TND,
            norms=None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps),
            tables=(rotary.cos_CN, rotary.sin_CN),
            positions_T=positions_T,
        )
        return attention.attend_heads(layer, heads, scale)
    return attention.attend(layer, rotate_and_store(qkv_TND, norms, rotary, positions_T, attention, layer), scale)


def rotate_and_store(
    qkv_TND: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotary: RotaryTable,
    positions_T: Tensor,
    attention: Attention,
    layer: int,
) -> Tensor:
    """Queries [T, H, D], rotated; keys, rotated, and values go to their pages in `layer`.

    `norms` are applied to each query and each key head before the rotation, if there are any. qkv is used up.
    """
    kv_heads = attention.caches[layer][0].shape[2]
    weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
    same_eps = norms is None or norms[0].eps == norms[1].eps
    if same_eps and use_cpu(qkv_TND):
        cos_sin_T1D = rotary.step_rows(positions_T, qkv_TND.dtype, attention.metadata)
        return token_cpu.rotate_and_store(qkv_TND, weights, cos_sin_T1D, attention, layer)
    if same_eps and use_triton(qkv_TND):
        from pegainfer_core.ops import token_triton

        tables = (rotary.cos_CN, rotary.sin_CN)
        write_index_T = attention.metadata.write_index_T
        return token_triton.rotate_and_store(
            qkv_TND, weights, tables, positions_T, attention.caches[layer], write_index_T
        )
    q_THD, k_TKD, v_TKD = torch.split(qkv_TND, [qkv_TND.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q_THD, k_TKD = norms[0](q_THD), norms[1](k_TKD)
    q_THD, k_TKD = rotary.forward(q_THD, k_TKD, positions_T)
    attention.store(layer, k_TKD, v_TKD)
    return q_THD
