"""The fused operations on a GPU against the plain ones, at the shapes of Qwen3-0.6B and Qwen3-4B; capture; overlap of launches."""

from __future__ import annotations

import itertools

import pytest
import torch
from pegainfer_core.ops import token_triton
from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.dispatch import fast_ops
from pegainfer_core.ops.linear import linear, linear_add, norm_gated_linear, norm_linear
from pegainfer_core.ops.norm import RMSNorm, add_rms_norm, rms_norm
from pegainfer_core.ops.sampling import greedy, sample
from torch import Tensor

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# relative to float64; two or three roundings of an output, and of what the norm gives
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 5e-6}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)
MODELS = {"0.6B": (1024, 3072, 2048, 4096), "4B": (2560, 9728, 4096, 6144), "odd": (1096, 1000, 264, 1032)}
"""Hidden, intermediate, query and stacked size."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    value: Tensor = torch.randn(shape, generator=generator, device=CUDA).to(dtype)
    return value


def weight_of(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    value: Tensor = random(*shape, dtype=torch.float32, seed=seed) * shape[-1] ** -0.5
    return value.to(dtype)


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-6, dtype)
    norm.weight = torch.nn.Parameter(random(size, dtype=dtype, seed=9).abs() + 0.5, requires_grad=False)
    return norm


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@DTYPES
@pytest.mark.parametrize("model", MODELS)
def test_products(model: str, dtype: torch.dtype) -> None:
    hidden, inter, query, stacked = MODELS[model]
    norm = norm_of(hidden, dtype)
    qkv, o = weight_of(stacked, hidden, dtype=dtype, seed=1), weight_of(hidden, query, dtype=dtype, seed=2)
    gate_up, down = weight_of(2 * inter, hidden, dtype=dtype, seed=3), weight_of(hidden, inter, dtype=dtype, seed=4)
    for tokens in TOKENS:
        x, residual = random(tokens, hidden, dtype=dtype, seed=5), random(tokens, hidden, dtype=dtype, seed=6)
        attended, wide = random(tokens, query, dtype=dtype, seed=7), random(tokens, inter, dtype=dtype, seed=8)
        normed = rms_norm(x.double(), norm.weight.double(), norm.eps)
        assert error(norm_linear(x, norm, qkv), normed @ qkv.double().T) < LIMITS[dtype], tokens
        gated = silu_mul(normed @ gate_up.double().T)
        assert error(norm_gated_linear(x, norm, gate_up), gated) < LIMITS[dtype], tokens
        for inputs, weight in ((attended, o), (wide, down)):
            expected = residual.double() + inputs.double() @ weight.double().T
            assert error(linear_add(inputs, weight, residual.clone()), expected) < LIMITS[dtype], tokens
        assert error(linear(x, qkv), x.double() @ qkv.double().T) < LIMITS[dtype], tokens


@DTYPES
def test_the_vocabulary(dtype: torch.dtype) -> None:
    x, weight = random(5, 1024, dtype=dtype), weight_of(151936, 1024, dtype=dtype, seed=1)
    assert error(linear(x, weight), x.double() @ weight.double().T) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("size", [1024, 2560, 5120, 1000])
def test_norms_and_activation(size: int, dtype: torch.dtype) -> None:
    norm = norm_of(size, dtype)
    for tokens in (1, 7, 300):
        x, residual = random(tokens, size, dtype=dtype), random(tokens, size, dtype=dtype, seed=1)
        expected = rms_norm(x.double(), norm.weight.double(), norm.eps)
        assert error(norm(x), expected) < LIMITS[dtype]
        normed, total = norm.add(x, residual)
        with fast_ops(False):
            plain, plain_total = add_rms_norm(x, residual, norm.weight, norm.eps)
        assert torch.equal(total, plain_total)
        assert error(normed, plain.double()) < LIMITS[dtype]
        gate_up = random(tokens, 2 * size, dtype=dtype)
        assert error(silu_mul(gate_up), silu_mul(gate_up.double())) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_greedy(dtype: torch.dtype) -> None:
    logits = random(9, 151936, dtype=dtype)
    logits[0, 151900:] = 99.0
    logits[1] = -torch.inf
    logits[2, 70000] = torch.nan
    logits[3, 0] = torch.inf
    logits[4, 100] = logits[4, 151000] = 30.0
    ids, finite = token_triton.greedy(logits, 151900)
    assert finite.tolist() == [1, 0, 0, 0, 1, 1, 1, 1, 1]
    assert ids[4] == 100
    with fast_ops(False):
        expected, _ = greedy(logits[4:], 151900)
    best = logits[4:].gather(1, expected[:, None])
    assert torch.equal(logits[4:].gather(1, ids[4:, None]), best)
    lowest = (logits[4:, :151900] == best).int().argmax(1)
    assert torch.equal(ids[4:], lowest)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 40])
def test_a_captured_chain_gives_the_same_bits(tokens: int) -> None:
    """Launches overlap the end of those before: each must wait for what it reads, also from one replay to the next."""
    hidden, inter, dtype = 1024, 3072, torch.bfloat16
    norm = norm_of(hidden, dtype)
    weights = [
        (weight_of(2 * inter, hidden, dtype=dtype, seed=layer), weight_of(hidden, inter, dtype=dtype, seed=50 + layer))
        for layer in range(12)
    ]

    def chain(x: Tensor) -> Tensor:
        for gate_up, down in weights:
            x = linear_add(norm_gated_linear(x, norm, gate_up), down, x)
        return norm.forward(x)

    inputs = [random(tokens, hidden, dtype=dtype, seed=seed) for seed in range(4)]
    expected = []
    for x in inputs:
        expected.append(chain(x.clone()))
        torch.cuda.synchronize()
    static = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static.clone())
    for turn, (x, value) in itertools.product(range(25), zip(inputs, expected, strict=True)):
        static.copy_(x)
        graph.replay()
        found = out.clone()
        assert torch.equal(found, value), turn


def test_draws_are_those_of_a_cpu() -> None:
    """A seed gives the same tokens wherever a request runs."""
    scaled = torch.randn(33, 151936, generator=torch.Generator().manual_seed(3)) * 3
    scaled[:, ::5] = -torch.inf
    keys = torch.arange(33) * 7_777_777_777_777 - 5
    with fast_ops(False):
        expected = sample(scaled, keys)
    assert torch.equal(sample(scaled.cuda(), keys.cuda()).cpu(), expected)
