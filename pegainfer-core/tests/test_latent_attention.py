"""Attention over latent pages: every backend and both forms against keys and values written out; how pages are laid out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pegainfer_core.family import KVGroup, ModelPlan
from pegainfer_core.kv.storage import allocate, page_bytes
from pegainfer_core.ops.attention import AttentionBackend, AttentionMetadata, make_attention_backend
from pegainfer_core.testing.latent_attention import latent_batch
from torch import Tensor

ROWS = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 70)],
    "prompt": [(33, 33)],
    "chunk": [(9, 40)],
    "mixture": [(1, 5), (1, 90), (2, 2), (17, 17), (5, 64)],
    "alike": [(1, 40), (1, 41), (1, 42)],
}


class AbsorbedOnly(AttentionBackend):
    """The default of every backend: the absorbed form, over keys whose first part is the values."""

    name = "absorbed"

    def __init__(self) -> None:
        self.inner = make_attention_backend("torch", torch.device("cpu"))

    def plan(self, metadata: AttentionMetadata) -> None:
        self.inner.plan(metadata)

    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        return self.inner.run(q_THD, k_cache_PSKD, v_cache_PSKD, metadata, scale)


def backend(name: str) -> AttentionBackend:
    return AbsorbedOnly() if name == "absorbed" else make_attention_backend(name, torch.device("cpu"))


@pytest.mark.parametrize("name", ["torch", "torch-batched", "absorbed"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_form_gives_what_heads_of_their_own_give(name: str, rows: list[tuple[int, int]], page_size: int) -> None:
    batch = latent_batch(rows, heads=4, rank=32, key_dim=24, rope_dim=8, value_dim=20, page_size=page_size)
    torch.testing.assert_close(batch.run(backend(name)).double(), batch.reference(), rtol=0, atol=2e-6)


def test_one_step_serves_layers_of_other_shapes() -> None:
    batch = latent_batch(ROWS["mixture"], heads=3, rank=16, key_dim=8, rope_dim=4, value_dim=12, page_size=16)
    wide = latent_batch(ROWS["mixture"], heads=2, rank=48, key_dim=8, rope_dim=16, value_dim=4, page_size=16)
    wide = dataclasses.replace(wide, metadata=batch.metadata)
    shared = make_attention_backend("torch-batched", torch.device("cpu"))
    for each in (batch, wide):
        torch.testing.assert_close(each.run(shared).double(), each.reference(), rtol=0, atol=2e-6)


def test_a_token_takes_one_row_in_each_layer() -> None:
    group = KVGroup(kind="latent", layers=(0, 2), latent_rank=512, latent_rope_dim=64)
    full = KVGroup(kind="full", layers=(1,), num_kv_heads=2, head_dim=8)
    plan = ModelPlan(
        family="any",
        config=None,
        dtype="float32",
        vocab_size=8,
        hidden_size=8,
        num_layers=3,
        max_context=8,
        eos_token_ids=frozenset(),
        kv_groups=(group, full),
        weight_rules=(),
    )
    assert page_bytes(plan.kv_groups, 16, 2) == (2 * 576 + 2 * 2 * 8) * 16 * 2
    caches = allocate(plan, 3, 16, torch.device("cpu"), torch.float16)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for pair in caches for each in pair}
    assert sum(storages.values()) == 3 * page_bytes(plan.kv_groups, 16, 2)
    keys, values = caches[2]
    assert keys.shape == (3, 16, 1, 576)
    keys.copy_(torch.arange(keys.numel()).view_as(keys) % 100)
    assert torch.equal(values, keys[..., :512])
