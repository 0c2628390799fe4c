"""Gated activations: over stacked gate and up projections, and of a gate beside its values.

Owns element-wise functions between two matrix products. Shape suffix: F intermediate size; leading dimensions are
free.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pegainfer_core.ops import token_cpu
from pegainfer_core.ops.dispatch import use_cpu, use_triton


def silu_mul(gate_up_2F: Tensor) -> Tensor:
    """silu(gate) * up of a tensor whose last dimension is [gate, up], each of size F."""
    if gate_up_2F.dim() == 2 and use_triton(gate_up_2F):
        from pegainfer_core.ops import token_triton

        return token_triton.silu_mul(gate_up_2F)
    if gate_up_2F.dim() == 2 and use_cpu(gate_up_2F) and (product_F := token_cpu.silu_mul(gate_up_2F)) is not None:
        return product_F
    gate_F, up_F = gate_up_2F.chunk(2, dim=-1)
    return F.silu(gate_F) * up_F


def sigmoid_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    """x * sigmoid(gate). The gate's rows may be parts of longer ones."""
    if use_triton(x_TF) and gate_TF.stride(1) == 1:
        from pegainfer_core.ops import token_triton

        return token_triton.sigmoid_mul(x_TF, gate_TF)
    return x_TF * gate_TF.sigmoid()
