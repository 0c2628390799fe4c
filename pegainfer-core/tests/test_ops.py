"""Norm, activation, linear and embedding against transformers' and torch's own modules."""

from __future__ import annotations

import pytest
import torch
from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.dispatch import fast_ops
from pegainfer_core.ops.linear import Embedding, Linear, embedding, linear
from pegainfer_core.ops.norm import RMSNorm, add_rms_norm, rms_norm
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 32), (0, 16)])
def test_rms_norm_is_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    reference = LlamaRMSNorm(shape[-1], eps=1e-6).to(dtype)
    reference.weight.data.copy_(weight)
    with fast_ops(False):
        found = rms_norm(x, weight, 1e-6)
    assert found.dtype is dtype
    assert torch.equal(found, reference(x))
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), found)


def test_rms_norm_sums_in_float32() -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # the squares overflow float16
    assert torch.equal(rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_add_then_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (random(*size, dtype=dtype, seed=seed) for seed, size in enumerate([(6, 32), (6, 32), (32,)]))
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(residual, before), "inputs are left alone"


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_takes_gate_first(dtype: torch.dtype) -> None:
    gate, up = random(4, 24, dtype=dtype), random(4, 24, dtype=dtype, seed=1)
    found = silu_mul(torch.cat((gate, up), dim=-1))
    assert found.dtype is dtype
    torch.testing.assert_close(found, torch.nn.SiLU()(gate) * up)


def test_linear_multiplies_by_the_transposed_weight() -> None:
    x, weight = random(3, 8), random(5, 8, seed=1)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_embedding_takes_rows() -> None:
    weight = random(7, 4)
    assert torch.equal(embedding(torch.tensor([6, 0, 6]), weight), weight[[6, 0, 6]])


@pytest.mark.parametrize(
    "module", [RMSNorm(8, 1e-6, torch.bfloat16), Linear(8, 4, torch.bfloat16), Embedding(9, 8, torch.bfloat16)]
)
def test_modules_start_on_the_meta_device_without_gradient(module: torch.nn.Module) -> None:
    parameters = dict(module.named_parameters())
    assert list(parameters) == ["weight"]
    assert parameters["weight"].is_meta
    assert parameters["weight"].dtype is torch.bfloat16
    assert not parameters["weight"].requires_grad


def test_linear_stores_output_features_first() -> None:
    assert Linear(8, 4, torch.float32).weight.shape == (4, 8)
