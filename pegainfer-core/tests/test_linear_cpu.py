"""Packed weights against the plain product, in every layout this machine has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pegainfer_core.ops import linear_cpu
from pegainfer_core.ops.linear import Embedding, Linear, linear, linear_add, norm_gated_linear, norm_linear
from pegainfer_core.ops.linear_cpu import PackedWeight, pack_linears
from pegainfer_core.ops.norm import RMSNorm
from torch import Tensor, nn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) * 0.1


def close(out: Tensor, expected: Tensor) -> None:
    limit = 2e-6 if out.dtype == torch.float32 else 1e-2
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


def without_units(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    for name in missing:
        monkeypatch.setattr(linear_cpu, name, lambda: False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounded", [True, False], ids=["as in a bfloat16 checkpoint", "any float32"])
@pytest.mark.parametrize(
    "missing",
    [(), ("has_native_bfloat16",), ("_has_half_weights",), ("has_native_bfloat16", "_has_half_weights", "_has_onednn")],
    ids=lambda missing: "without " + ", ".join(missing) if missing else "all there is",
)
def test_equals_the_plain_product(
    dtype: torch.dtype, rounded: bool, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_units(monkeypatch, *missing)
    weight_OI = weight(torch.bfloat16, 40, 24).to(dtype) if rounded else weight(dtype, 40, 24)
    packed = PackedWeight(weight_OI)
    assert (packed.shape, packed.dtype, packed.device.type) == (weight_OI.shape, dtype, "meta")
    for shape in ((1, 24), (7, 24), (0, 24), (2, 3, 24), (130, 24)):
        x = weight(dtype, *shape, seed=1)
        close(linear(x, packed), F.linear(x, weight_OI))
    strided = weight(dtype, 5, 48, seed=2)[:, ::2]
    close(linear(strided, packed), F.linear(strided, weight_OI))


def test_half_the_bytes_where_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    if not linear_cpu._has_half_weights():
        pytest.skip("torch has no float16 weights here")
    weight_OI = weight(torch.bfloat16, 40, 24).float()
    assert PackedWeight(weight_OI).num_bytes == 40 * 24 * 2
    for value in (1 + 2**-20, 1e6, torch.inf, torch.nan):  # more bits, or more range, than float16 has
        weight_OI[3, 4] = value
        assert PackedWeight(weight_OI).num_bytes == 40 * 24 * 4
        close(linear(torch.eye(24), PackedWeight(weight_OI))[4, :3], weight_OI[:3, 4])
    without_units(monkeypatch, "_has_half_weights")
    assert PackedWeight(weight(torch.bfloat16, 40, 24).float()).num_bytes == 40 * 24 * 4


def test_tiny_values_survive() -> None:
    """What a bfloat16 checkpoint holds below float16's normal range is rounded to its smallest steps, not to zero."""
    weight_OI = torch.tensor([[2.0**-20, 2.0**-24, -(2.0**-22)]])
    product = linear(torch.eye(3) * 2.0**20, PackedWeight(weight_OI))
    torch.testing.assert_close(product, (weight_OI * 2.0**20).T, atol=2.0**-5, rtol=0.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(40, 24, torch.float32)
        self.norm = RMSNorm(24, 1e-6, torch.float32)
        self.gate_up = Linear(24, 2 * 24, torch.float32)
        self.head = Linear(24, 40, torch.float32)
        self.head_again = Linear(24, 40, torch.float32)
        modules: list[Embedding | RMSNorm | Linear] = [self.embed, self.norm, self.gate_up]
        for seed, module in enumerate(modules):
            module.weight = nn.Parameter(weight(torch.float32, *module.weight.shape, seed=seed), requires_grad=False)
        self.head.weight = self.head_again.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x_TE: Tensor = self.embed(ids)
        x_TE = linear_add(norm_gated_linear(x_TE, self.norm, self.gate_up.weight), self.square, x_TE)
        return torch.cat((norm_linear(x_TE, self.norm, self.gate_up.weight), self.head(x_TE)), dim=-1)

    @property
    def square(self) -> Tensor:
        return torch.eye(24)


def test_a_model_is_packed_once() -> None:
    model = Tied()
    ids = torch.tensor([3, 0, 39])
    expected = model(ids)
    table = model.embed.weight
    num_bytes = pack_linears(model)
    assert model.embed.weight is table, "a tied table is still looked up"
    assert model.head.weight is model.head_again.weight, "and shared weights are packed once"
    assert isinstance(model.gate_up.weight, PackedWeight)
    assert num_bytes == (40 * 24 + 24 + 48 * 24 + 40 * 24) * 4
    close(model(ids), expected)
