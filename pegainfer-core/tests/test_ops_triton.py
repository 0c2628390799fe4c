"""The Triton kernels of linear layers and of single tokens on CPU tensors, in Triton's interpreter, against the plain ones.

The interpreter's bfloat16 is wrong, so values are checked in float32 and float16 here and in bfloat16 by tests/gpu.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from pegainfer_core.ops import linear_triton, token_triton
from pegainfer_core.ops.activation import sigmoid_mul, silu_mul
from pegainfer_core.ops.attention import Attention, StackedHeads
from pegainfer_core.ops.attention_torch import TorchAttention
from pegainfer_core.ops.attention_triton import SplitRule, TritonAttention
from pegainfer_core.ops.dispatch import fast_ops, use_triton
from pegainfer_core.ops.heads import rotate_and_attend, rotate_and_store
from pegainfer_core.ops.linear_tiles import LinearTile, choose_tile, shared_bytes
from pegainfer_core.ops.norm import RMSNorm, add_rms_norm, rms_norm
from pegainfer_core.ops.rope import RotaryTable
from pegainfer_core.ops.sampling import greedy, sample
from pegainfer_core.rope_config import RopeConfig
from pegainfer_core.testing.paged_attention import paged_batch
from torch import Tensor

CPU = torch.device("cpu")
EPS = 1e-6
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)

TILES = {
    "rows": LinearTile(features=4, depth=32, warps=1, stages=1),
    "rows in a pipeline": LinearTile(features=8, depth=16, warps=1, stages=3),
    "matrix": LinearTile(features=16, depth=32, warps=1, stages=2, matrix_units=True),
    "matrix, weight first": LinearTile(features=16, depth=16, warps=1, stages=2, matrix_units=True, weight_first=True),
}

SPLIT = SplitRule(programs=40, shortest=32, longest=8192)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@DTYPES
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", [(1, 24, 64), (2, 21, 100), (3, 40, 72), (16, 33, 50), (17, 16, 64)], ids=str)
def test_linear(shape: tuple[int, int, int], tile: LinearTile, dtype: torch.dtype) -> None:
    tokens, features, depth = shape
    x, norm = random(tokens, depth, dtype=dtype), random(depth, dtype=dtype, seed=1)
    residual = random(tokens, features, dtype=dtype, seed=2)
    for gated, normed, added in itertools.product([False, True], repeat=3):
        weight = random(features * (1 + gated), depth, dtype=dtype, seed=3) * depth**-0.5
        expected = (rms_norm(x, norm, EPS) if normed else x) @ weight.T
        expected = silu_mul(expected) if gated else expected
        expected = expected + residual if added else expected
        found = linear_triton.linear(
            x,
            weight,
            tile,
            norm_I=norm if normed else None,
            eps=EPS,
            gated=gated,
            residual_TO=residual if added else None,
        )
        assert error(found, expected) < LIMITS[dtype], (gated, normed, added)


def test_linear_takes_rows_of_a_larger_tensor() -> None:
    wide = random(3, 200, dtype=torch.float32)
    x, residual = wide[:, 40:104], wide[:, 104:128]
    weight = random(24, 64, dtype=torch.float32, seed=1)
    found = linear_triton.linear(x, weight, TILES["rows"], residual_TO=residual)
    assert error(found, x @ weight.T + residual) < LIMITS[torch.float32]


def test_tiles_are_for_few_tokens() -> None:
    """Measured weights have tiles of their own, near ones the same; others one for a single token."""
    bf16 = torch.bfloat16
    for features, depth, gated in [(6144, 2560, False), (2560, 4096, False), (9728, 2560, True), (2560, 9728, False)]:
        own = choose_tile(16, features, depth, bf16, gated)
        assert own is not None
        assert own == choose_tile(9, features + 512, depth + 128, bf16, gated)
        assert choose_tile(17, features, depth, bf16, gated) is None
        assert choose_tile(16, features, depth, torch.float32, gated) is None
        assert choose_tile(1, features, depth, bf16, gated) != own
        assert own.stages * own.depth * 2 * (own.features + 16) <= shared_bytes(own, 16, bf16, gated) < 228 << 10
    assert choose_tile(5, 6144, 2560, bf16, False) is None
    assert choose_tile(32, 151936, 2560, bf16, False) is not None
    for dtype in (bf16, torch.float16, torch.float32):
        assert choose_tile(1, 1000, 300, dtype, False) is not None
        assert choose_tile(2, 1000, 300, dtype, False) is None


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (5, 257)], ids=str)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = random(shape[0], shape[1] + 7, dtype=dtype)
    x, residual, weight = wide[:, 7:], random(*shape, dtype=dtype, seed=1), random(shape[1], dtype=dtype, seed=2)
    assert error(token_triton.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS)) < LIMITS[dtype]
    found, total = token_triton.add_rms_norm(x, residual, weight, EPS)
    expected, expected_total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert error(found, expected) < LIMITS[dtype]


def test_a_float32_weight_of_a_norm_is_applied_before_the_one_rounding() -> None:
    x = random(5, 200, dtype=torch.float16)
    weight = 1 + 1e-4 * random(200, dtype=torch.float32, seed=1)  # float16 would make most of it 1
    exact = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()).half()
    for found in (rms_norm(x, weight, EPS), token_triton.rms_norm(x, weight, EPS)):
        assert found.dtype == torch.float16
        assert float((found != exact).float().mean()) < 0.01, "rounded twice"


@DTYPES
def test_sigmoid_mul(dtype: torch.dtype) -> None:
    x, wide = random(3, 200, dtype=dtype), random(3, 300, dtype=dtype, seed=1)
    gate = wide[:, 50:250]
    assert error(token_triton.sigmoid_mul(x, gate), sigmoid_mul(x, gate)) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 6), (3, 200), (2, 2100)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(*shape, dtype=dtype)
    assert error(token_triton.silu_mul(gate_up), silu_mul(gate_up)) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((5, 1), 24), ((3, 3), 32), ((14, 2), 8)], ids=str)
def test_heads(heads: tuple[int, int], head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    rows = [(1, 15), (1, 33), (5, 21), (17, 17)]
    num_heads, kv_heads = heads
    batch = paged_batch(rows, heads=heads, head_dim=head_dim, page_size=16, dtype=dtype)
    positions_T = torch.cat([torch.arange(context - new, context) for new, context in rows])
    rotary = RotaryTable(RopeConfig(theta=1e4, scaling=None), head_dim, 64, CPU)
    wide = random(len(positions_T), (num_heads + 2 * kv_heads) * head_dim + 8, dtype=dtype)
    qkv_TND = wide[:, 8:].view(len(positions_T), -1, head_dim)
    norms = RMSNorm(head_dim, EPS, dtype), RMSNorm(head_dim, EPS, dtype)
    for seed, norm in enumerate(norms):
        norm.weight = torch.nn.Parameter(random(head_dim, dtype=dtype, seed=seed), requires_grad=False)

    plain_caches = batch.caches[0].clone(), batch.caches[1].clone()
    attention = Attention(backend=TorchAttention(), caches=[plain_caches], metadata=batch.metadata)
    expected = rotate_and_store(qkv_TND, norms if normed else None, rotary, positions_T, attention, 0)
    found = token_triton.rotate_and_store(
        qkv_TND,
        (norms[0].weight, norms[1].weight, EPS) if normed else None,
        (rotary.cos_CN, rotary.sin_CN),
        positions_T,
        batch.caches,
        batch.metadata.write_index_T,
    )
    assert error(found, expected) < LIMITS[dtype]
    for cache, expected_cache in zip(batch.caches, plain_caches, strict=True):
        assert torch.equal(cache.isnan(), expected_cache.isnan()), "places of no token are left alone"
        assert error(cache.nan_to_num(), expected_cache.nan_to_num()) < LIMITS[dtype]


@pytest.mark.parametrize(
    ("heads", "head_dim", "normed", "rule", "dtype"),
    [
        ((4, 2), 16, True, None, torch.float16),
        ((4, 2), 16, True, SPLIT, torch.float32),
        ((5, 1), 24, False, SPLIT, torch.float16),
        ((3, 3), 32, True, SPLIT, torch.float16),
    ],
    ids=str,
)
def test_attention_from_stacked_heads(
    heads: tuple[int, int], head_dim: int, normed: bool, rule: SplitRule | None, dtype: torch.dtype
) -> None:
    rows = [(1, 1), (1, 2), (1, 16), (1, 17), (1, 129), (1, 300), (5, 21)]
    num_heads, kv_heads = heads
    batch = paged_batch(rows, heads=heads, head_dim=head_dim, page_size=16, dtype=dtype)
    positions_T = torch.cat([torch.arange(context - new, context) for new, context in rows])
    rotary = RotaryTable(RopeConfig(theta=1e4, scaling=None), head_dim, 512, CPU)
    wide = random(len(positions_T), (num_heads + 2 * kv_heads) * head_dim + 8, dtype=dtype)
    qkv_TND = wide[:, 8:].view(len(positions_T), -1, head_dim)
    norms = RMSNorm(head_dim, EPS, dtype), RMSNorm(head_dim, EPS, dtype)
    for seed, norm in enumerate(norms):
        norm.weight = torch.nn.Parameter(random(head_dim, dtype=dtype, seed=seed), requires_grad=False)

    plain_caches = batch.caches[0].clone(), batch.caches[1].clone()
    plain = Attention(backend=TorchAttention(), caches=[plain_caches], metadata=batch.metadata)
    expected = rotate_and_attend(qkv_TND, norms if normed else None, rotary, positions_T, plain, 0)
    backend = TritonAttention(CPU, rule)
    parts = StackedHeads(
        qkv_TND=qkv_TND,
        norms=(norms[0].weight, norms[1].weight, EPS) if normed else None,
        tables=(rotary.cos_CN, rotary.sin_CN),
        positions_T=positions_T,
    )
    attention = Attention(backend=backend, caches=[batch.caches], metadata=batch.metadata)
    for _ in range(2):  # what a launch leaves behind does not matter to the next
        found = attention.attend_heads(0, parts)
        assert error(found, expected) < 2 * LIMITS[dtype]
        for cache, expected_cache in zip(batch.caches, plain_caches, strict=True):
            assert torch.equal(cache.isnan(), expected_cache.isnan()), "places of no token are left alone"
            assert error(cache.nan_to_num(), expected_cache.nan_to_num()) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("width", "vocab_size"), [(7, 7), (9000, 8999), (9000, 4097)])
def test_greedy(width: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = random(6, width, dtype=dtype).clamp(-3, 2.5)  # many ties
    logits[0, vocab_size:] = 9.0
    logits[1] = -torch.inf
    logits[2, vocab_size // 2] = torch.nan
    logits[3, vocab_size - 1] = torch.inf
    logits[4, : vocab_size - 1] = -torch.inf
    ids, finite = token_triton.greedy(logits, vocab_size)
    assert ids.dtype == finite.dtype == torch.int64
    assert finite.tolist() == [1, 0, 0, 0, 1, 1]
    usable = finite.bool()
    assert torch.equal(ids[usable], greedy(logits, vocab_size)[0][usable])
    assert torch.equal(ids[5], (logits[5, :vocab_size] == logits[5, :vocab_size].max()).nonzero()[0, 0])
    assert ((ids >= 0) & (ids < vocab_size)).all(), "also where nothing is finite"


def test_fast_paths_are_for_gpus_and_can_be_turned_off() -> None:
    assert not use_triton(torch.zeros(2, 3))
    with fast_ops(False):
        assert not use_triton(torch.zeros(2, 3))


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_draws_are_the_plain_ones(scale: float) -> None:
    scaled = random(12, 9000, dtype=torch.float32) * scale
    scaled[:, ::3] = -torch.inf
    scaled[7] = -torch.inf
    keys = torch.arange(12) * 7_777_777_777_777 - 5
    with fast_ops(False):
        expected = sample(scaled, keys)
    assert torch.equal(token_triton.sample(scaled, keys), expected)
