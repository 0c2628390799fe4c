"""What a step does per token besides matrix products and attention: our C kernels for few rows, else few torch calls.

Owns the CPU's ways; at a few rows a call costs more than its arithmetic. Each gives what the plain composition beside its caller
gives, up to rounding. Knows no family.

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

from pegainfer_core.ops.cpu_native import MOST_ROWS, Kernels, kernels

if TYPE_CHECKING:
    from pegainfer_core.ops.attention import Attention


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See ops/norm.py."""
    if x.dim() == 2 and (native := _native(x)):
        return native.rms_norm(x, weight_E, eps)
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


def silu_mul(gate_up_T2F: Tensor) -> Tensor | None:
    """See ops/activation.py; None where torch is as good."""
    native = _native(gate_up_T2F)
    return native.silu_mul(gate_up_T2F) if native and gate_up_T2F.is_contiguous() else None


def _native(x: Tensor) -> Kernels | None:
    return kernels(x.dtype) if 0 < x.shape[0] <= MOST_ROWS and x.stride(-1) == 1 else None


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
    caches_PSKD = attention.caches[layer]
    same_types = norms is None or norms[0].dtype == norms[1].dtype == qkv_TND.dtype == caches_PSKD[0].dtype
    if same_types and qkv_TND.is_contiguous() and (native := _native(qkv_TND)):
        return native.rotate_and_store(qkv_TND, norms, cos_sin_T1D, caches_PSKD, attention.metadata.write_index_T)
    kv_heads = caches_PSKD[0].shape[2]
    heads = qkv_TND.shape[1] - 2 * kv_heads
    x_TMD = qkv_TND.narrow(1, 0, heads + kv_heads)
    if norms is not None:
        query_D, key_D, eps = norms
        x_TMD = normalise(x_TMD, eps).mul_(torch.cat((query_D.expand(heads, -1), key_D.expand(kv_heads, -1))))
    cos_T1D, sin_T1D = cos_sin_T1D
    rotated_TMD = x_TMD.roll(x_TMD.shape[-1] // 2, -1).mul_(sin_T1D).add_(x_TMD * cos_T1D)
    attention.store(layer, rotated_TMD.narrow(1, heads, kv_heads), qkv_TND.narrow(1, heads + kv_heads, kv_heads))
    return rotated_TMD.narrow(1, 0, heads)


def sample(scaled_RV: Tensor, key_R: Tensor) -> Tensor | None:
    """See ops/sampling.py; None where there is no kernel for it."""
    native = kernels(torch.float32) if scaled_RV.dtype == torch.float32 else None
    return None if native is None else native.draw(scaled_RV.contiguous(), key_R.contiguous())


def greedy(logits_NV: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """See ops/sampling.py. numpy's arg max uses vector instructions, torch's does not (27 against 486 us, 8 x 49152)."""
    values_NV = logits_NV[:, :vocab_size].float().numpy()
    ids_N = values_NV.argmax(-1)
    best_N = values_NV[np.arange(len(ids_N)), ids_N]
    return torch.from_numpy(ids_N), torch.from_numpy(np.isfinite(best_N).astype(np.int64))
