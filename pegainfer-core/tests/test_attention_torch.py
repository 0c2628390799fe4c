"""The batched torch backend against float64, and how it groups rows."""

from __future__ import annotations

import random

import pytest
import torch
from pegainfer_core.ops import attention_torch
from pegainfer_core.ops.attention import make_attention_backend
from pegainfer_core.ops.attention_torch import GROUP_TOKENS, BatchedTorchAttention, TorchAttention, group_rows
from pegainfer_core.ops.cpu_native import kernels
from pegainfer_core.testing.paged_attention import paged_batch

CPU = torch.device("cpu")

BATCHES = {
    "one row": [(1, 37)],
    "one token": [(1, 1)],
    "a full page": [(1, 16)],
    "equal lengths": [(1, 20), (1, 20), (1, 20)],
    "similar lengths": [(1, 20), (1, 33), (1, 17)],
    "far apart": [(1, 300), (1, 3), (1, 40), (1, 290), (1, 1)],
    "a prompt": [(23, 23)],
    "a chunk": [(23, 60)],
    "many": [(1, 1 + row % 7) for row in range(70)],
    "long": [(1, 5000), (1, 4000)],
    "all kinds": [(1, 5), (1, 90), (1, 6), (23, 23), (7, 71), (2, 2)],
    "a single token that is no decode row": [(3, 3), (1, 9)],
}


@pytest.fixture(params=["C kernels", "torch"], autouse=True)
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(attention_torch, "kernels", lambda dtype: None)
    elif kernels(torch.float32) is None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize("backend", [TorchAttention(), BatchedTorchAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_equals_float64(
    rows: list[tuple[int, int]], heads: tuple[int, int], backend: TorchAttention | BatchedTorchAttention
) -> None:
    batch = paged_batch(rows, heads=heads, head_dim=8, page_size=16)
    torch.testing.assert_close(batch.run(backend, scale=0.3).double(), batch.reference(0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [BATCHES["all kinds"], BATCHES["far apart"]], ids=["all kinds", "far apart"])
def test_other_types(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    batch = paged_batch(rows, heads=(6, 2), head_dim=16, page_size=4, dtype=dtype)
    out_THD = batch.run(BatchedTorchAttention())
    assert out_THD.dtype == dtype
    torch.testing.assert_close(out_THD.double(), batch.reference(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("neighbours", [True, False])
def test_pages_side_by_side_and_scattered_give_the_same(neighbours: bool) -> None:
    batch = paged_batch([(1, 50)], heads=(4, 2), head_dim=8, page_size=16)
    pages = [2, 3, 4, 5] if neighbours else [5, 2, 4, 3]
    place = torch.tensor(pages).repeat_interleave(16)[:50] * 16 + torch.arange(50) % 16
    for cache, values in zip(batch.caches, batch.contexts[0], strict=True):
        cache.fill_(float("nan"))
        cache.flatten(0, 1)[place[:-1]] = values[:-1]
    batch.metadata.page_table_RP.copy_(torch.tensor([pages]))
    batch.metadata.write_index_T.copy_(place[-1:])
    torch.testing.assert_close(batch.run(BatchedTorchAttention()).double(), batch.reference(), atol=2e-6, rtol=1e-5)


def test_each_step_is_prepared_anew() -> None:
    backend = BatchedTorchAttention()
    for rows in (BATCHES["similar lengths"], BATCHES["all kinds"], BATCHES["one row"]):
        batch = paged_batch(rows, heads=(4, 2), head_dim=8, page_size=16)
        for _ in range(2):  # two layers would share the preparation
            torch.testing.assert_close(batch.run(backend).double(), batch.reference(), atol=2e-6, rtol=1e-5)


def test_groups_hold_every_row_once_with_little_padding() -> None:
    chance = random.Random(5)
    for _ in range(200):
        lens = [chance.choice([1, 3, 20, 500, 5000, 9000]) + chance.randrange(50) for _ in range(chance.randrange(40))]
        groups = group_rows(lens)
        assert sorted(row for group in groups for row in group) == list(range(len(lens)))
        for group in groups:
            longest = max(lens[row] for row in group)
            assert all(2 * lens[row] >= longest for row in group)
            assert len(group) == 1 or len(group) * longest <= GROUP_TOKENS
            assert group == sorted(group)


def test_the_name_gives_the_backend() -> None:
    for name, kind in (("torch", TorchAttention), ("torch-batched", BatchedTorchAttention)):
        backend = make_attention_backend(name, CPU)
        assert type(backend) is kind
        assert backend.name == name
