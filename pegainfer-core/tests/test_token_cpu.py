"""The CPU's ways of norms, rotation and arg max against the plain compositions."""

from __future__ import annotations

import pytest
import torch
from pegainfer_core.ops import sampling, token_cpu
from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.attention import Attention
from pegainfer_core.ops.attention_torch import TorchAttention
from pegainfer_core.ops.cpu_native import kernels
from pegainfer_core.ops.dispatch import fast_ops
from pegainfer_core.ops.heads import rotate_and_store
from pegainfer_core.ops.norm import RMSNorm, rms_norm
from pegainfer_core.ops.rope import RotaryTable
from pegainfer_core.ops.sampling import greedy
from pegainfer_core.rope_config import RopeConfig
from pegainfer_core.testing.paged_attention import paged_batch
from torch import Tensor, nn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CPU = torch.device("cpu")


@pytest.fixture(params=["C kernels", "torch"], autouse=True)
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(token_cpu, "kernels", lambda dtype: None)
    elif kernels(torch.float32) is None:
        pytest.skip("no C compiler")


def close(out: Tensor, expected: Tensor) -> None:
    limit = LIMITS[expected.dtype]
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


def norm(size: int, dtype: torch.dtype, eps: float = 1e-6) -> RMSNorm:
    module = RMSNorm(size, eps, dtype)
    module.weight = nn.Parameter(torch.rand(size).to(dtype) + 0.5, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 48), (9, 48), (100, 48), (3, 5, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 30.0])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    before = x.clone()
    out = rms_norm(x, norm(48, dtype).weight.data.fill_(1.25), 1e-5)
    with fast_ops(False):
        close(out, rms_norm(x, torch.full((48,), 1.25, dtype=dtype), 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 100])
def test_gated_activation(dtype: torch.dtype, tokens: int) -> None:
    gate_up = (torch.randn(tokens, 2 * 37, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    out = silu_mul(gate_up)
    wide = torch.cat((gate_up, gate_up), dim=1)[:, : 2 * 37]
    with fast_ops(False):
        close(out, silu_mul(gate_up))
        close(silu_mul(wide), silu_mul(gate_up))


def test_gates_of_any_size_and_none() -> None:
    gate = torch.tensor(
        [-torch.inf, -1e30, -100.0, -88.5, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.5, 1e30, torch.nan]
    )
    gate = torch.cat((gate, torch.linspace(-90, 90, 20_000)))
    out = silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    assert out.isnan().tolist()[1:] == exact.isnan().tolist()[1:], "only NaN gives NaN"
    torch.testing.assert_close(out[1:].double(), exact[1:], rtol=1e-6, atol=1e-36, equal_nan=True)


def test_a_norm_of_another_type_keeps_its_precision() -> None:
    """Its weight is float32, and what comes of it is rounded once, to the input's type."""
    x = torch.randn(4, 48).bfloat16()
    weight = norm(48, torch.float32).weight
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    # half a unit in the last place, and float32's own error
    assert ((found.double() - exact).abs() <= (2**-8 + 1e-5) * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["none", "same eps", "two eps"])
def test_heads(dtype: torch.dtype, norms: str) -> None:
    batch = paged_batch([(1, 30), (1, 9), (5, 21)], heads=(6, 2), head_dim=8, page_size=4, dtype=dtype)
    rotary = RotaryTable(RopeConfig(theta=1e4, scaling=None), 8, 64, CPU)
    both = None if norms == "none" else (norm(8, dtype), norm(8, dtype, 1e-6 if norms == "same eps" else 1e-2))
    positions_T = torch.tensor([29, 8, 16, 17, 18, 19, 20])
    qkv_TND = torch.cat((batch.q_THD, batch.k_TKD, batch.v_TKD), dim=1)

    def run(fast: bool) -> tuple[Tensor, Tensor, Tensor]:
        caches = [(batch.caches[0].clone(), batch.caches[1].clone()) for _ in range(2)]
        attention = Attention(backend=TorchAttention(), caches=caches, metadata=batch.metadata)
        with fast_ops(fast):
            q_THD = rotate_and_store(qkv_TND.clone(), both, rotary, positions_T, attention, 1)
        assert caches[0][0].isnan().equal(batch.caches[0].isnan()), "other layers are left alone"
        return q_THD, *caches[1]

    for fast, plain in zip(run(True), run(False), strict=True):
        assert fast.isnan().equal(plain.isnan())
        close(fast.nan_to_num(), plain.nan_to_num())


def test_rotation_rows_are_those_of_the_step() -> None:
    rotary = RotaryTable(RopeConfig(theta=1e4, scaling=None), 8, 64, CPU)
    positions_T = torch.zeros(2, dtype=torch.int64)
    for positions in ([0, 5], [7], [63, 2]):
        positions_T[: len(positions)] = torch.tensor(positions)  # the same tensor, filled again
        step = object()
        first = rotary.step_rows(positions_T[: len(positions)], torch.float32, step)
        assert rotary.step_rows(positions_T, torch.float32, step) is first, "the layers of a step share them"
        cos_T1D, sin_T1D = first
        torch.testing.assert_close(cos_T1D[:, 0, 4:], rotary.cos_CN[positions])
        torch.testing.assert_close(sin_T1D[:, 0, :4], -rotary.sin_CN[positions])
        assert rotary.step_rows(positions_T, torch.bfloat16, step)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits_NV[1, 990] = 50.0  # beyond the vocabulary
    logits_NV[2, [800, 30, 500]] = 9.0  # a tie
    logits_NV[3, 17] = torch.nan
    logits_NV[4] = -torch.inf
    logits_NV[5, 3] = torch.inf
    logits_NV[6, 4:] = -torch.inf
    ids_N, finite_N = greedy(logits_NV, 980)
    with fast_ops(False):
        expected_N, expected_finite_N = greedy(logits_NV, 980)
    assert (ids_N.dtype, finite_N.dtype) == (torch.int64, torch.int64)
    assert ids_N.tolist() == expected_N.tolist()
    assert finite_N.tolist() == expected_finite_N.tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert ids_N[2] == 30
    assert ids_N[1] < 980


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
def test_draws_are_the_plain_ones(scale: float) -> None:
    scaled = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)) * scale
    scaled[:, ::3] = -torch.inf
    scaled[7] = -torch.inf
    keys = torch.arange(40) * 7_777_777_777_777 - 5
    with fast_ops(False):
        expected = sampling.sample(scaled, keys)
    assert torch.equal(sampling.sample(scaled, keys), expected)
    assert torch.equal(sampling.sample(scaled[:, ::2], keys), sampling.sample(scaled[:, ::2].contiguous(), keys))
