"""What a step does per token besides matrix products and attention, in as few torch calls as give the same numbers.

Owns the CPU's ways; at a few rows a call costs more than its arithmetic. Each gives what the plain composition beside its caller
gives. Knows no family.

Shape suffixes: T tokens, N all heads (queries, then keys, then values) or rows of logits, H query heads, K key/value heads,
D head dim, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from pegainfer_core.ops.attention import Attention


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See ops/norm.py."""
    if x.dtype == torch.float32 and x.numel() == x.shape[-1]:
        # a single row: its factor as a number saves half of the calls
        factor = 1 / math.sqrt(torch.linalg.vector_norm(x).item() ** 2 / x.shape[-1] + eps)
        return torch.addcmul(_scalar(0.0), x, weight_E, value=factor)
    return normalise(x, eps).mul_(weight_E)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's type."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normalised = x * factor
    return normalised if x.dtype == torch.float32 else normalised.to(x.dtype)


@functools.cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value)


def rotate_and_store(
    qkv_TND: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_sin_T1D: tuple[Tensor, Tensor],
    attention: Attention,
    layer: int,
) -> Tensor:
    """See ops/heads.py. Queries and keys are normalised and rotated as one tensor; `norms` are two weights [D] and eps."""
    kv_heads = attention.caches[layer][0].shape[2]
    heads = qkv_TND.shape[1] - 2 * kv_heads
    x_TMD = qkv_TND.narrow(1, 0, heads + kv_heads)
    if norms is not None:
        query_D, key_D, eps = norms
        x_TMD = normalise(x_TMD, eps).mul_(torch.cat((query_D.expand(heads, -1), key_D.expand(kv_heads, -1))))
    cos_T1D, sin_T1D = cos_sin_T1D
    rotated_TMD = x_TMD.roll(x_TMD.shape[-1] // 2, -1).mul_(sin_T1D).add_(x_TMD * cos_T1D)
    attention.store(layer, rotated_TMD.narrow(1, heads, kv_heads), qkv_TND.narrow(1, heads + kv_heads, kv_heads))
    return rotated_TMD.narrow(1, 0, heads)


def greedy(logits_NV: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """See ops/sampling.py. numpy's arg max uses vector instructions, torch's does not (27 against 486 us, 8 x 49152)."""
    values_NV = logits_NV[:, :vocab_size].float().numpy()
    ids_N = values_NV.argmax(-1)
    best_N = values_NV[np.arange(len(ids_N)), ids_N]
    return torch.from_numpy(ids_N), torch.from_numpy(np.isfinite(best_N).astype(np.int64))
