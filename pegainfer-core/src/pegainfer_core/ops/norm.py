"""RMS normalisation: a plain weight (a weight rule's offset makes it of 1 + weight), sums in float32.

What is normalised is rounded to the weight's type before the weight is applied: not at all where that is float32.

Owns the functions and the module that holds a weight. Knows no family.

Shape suffixes: E the normalised dimension; leading dimensions are free.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pegainfer_core.ops import token_cpu
from pegainfer_core.ops.dispatch import use_cpu, use_triton


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension in float32, cast to the weight's type, times it; in x's type."""
    if x.dim() == 2 and use_triton(x):
        from pegainfer_core.ops import token_triton

        return token_triton.rms_norm(x, weight_E, eps)
    if use_cpu(x) and x.dtype == weight_E.dtype:
        return token_cpu.rms_norm(x, weight_E, eps)
    x_float = x.float()
    variance = x_float.square().mean(-1, keepdim=True)
    return (weight_E * (x_float * torch.rsqrt(variance + eps)).to(weight_E.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream and normalise the sum: (normalised, new residual).

    The sum is rounded to x's type before it is normalised, as if the two were separate operations.
    """
    if x.dim() == 2 and use_triton(x) and residual.stride(-1) == 1:
        from pegainfer_core.ops import token_triton

        return token_triton.add_rms_norm(x, residual, weight_E, eps)
    residual = residual + x
    return rms_norm(residual, weight_E, eps), residual


class RMSNorm(nn.Module):
    """A weight on the meta device and its epsilon. Call it with one tensor, or use `add` on the residual stream."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """See `rms_norm`."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `add_rms_norm`."""
        return add_rms_norm(x, residual, self.weight, self.eps)
