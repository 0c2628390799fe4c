"""The tensors behind the pages and the slots of recurrent state.

Owns their layout and what a page or a slot costs: [pages, page size, kv heads, head dim] for keys and for values of each layer, where a
latent layer has one head and its values are the first part of its keys; and [slots, *shape] for each tensor of a layer's state. Knows
nothing of requests. The only module of `kv` that imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegainfer_core.family import KVGroup, ModelPlan


def page_bytes(groups: Sequence[KVGroup], page_size: int, itemsize: int) -> int:
    """Bytes that one page takes over all layers."""
    return sum(group.values_per_token * len(group.layers) for group in groups) * page_size * itemsize


def allocate(
    plan: ModelPlan, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """(keys, values) per model layer, empty for state layers. Left as found: no position is read before it was written."""
    caches: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * plan.num_layers
    for group in plan.kv_groups:
        if group.kind == "state":
            continue
        if group.kind == "latent":
            rows = torch.empty(
                (len(group.layers), num_pages, page_size, 1, group.values_per_token), dtype=dtype, device=device
            )
            for index, layer in enumerate(group.layers):
                caches[layer] = (rows[index], rows[index, ..., : group.latent_rank])
            continue
        shape = (len(group.layers), 2, num_pages, page_size, group.num_kv_heads, group.head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        for index, layer in enumerate(group.layers):
            caches[layer] = (pool[index, 0], pool[index, 1])
    return caches


class StateStorage:
    """The recurrent states of `num_slots` requests, of padding, and snapshots. Left as found: a row that begins from zero reads nothing."""

    def __init__(
        self, plan: ModelPlan, num_slots: int, num_snapshots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layers: list[tuple[Tensor, ...]] = [()] * plan.num_layers
        """As `States.layers` describes; the slot after the last one is padding."""
        self._pools: list[Tensor] = []
        """For each tensor of each group, [layers, slots, padding and snapshots, *shape]."""
        self._first_snapshot = num_slots + 1
        for group in plan.kv_groups:
            pools = [
                torch.empty(
                    (len(group.layers), self._first_snapshot + num_snapshots, *tensor.shape),
                    dtype=torch.float32 if tensor.dtype == "float32" else dtype,
                    device=device,
                )
                for tensor in group.state
            ]
            self._pools += pools
            for index, layer in enumerate(group.layers):
                self.layers[layer] = tuple(pool[index, : self._first_snapshot] for pool in pools)

    def save(self, slot: int, snapshot: int) -> None:
        """Copy a slot's state to a snapshot, behind what the device was given before."""
        self._copy(slot, self._first_snapshot + snapshot)

    def restore(self, snapshot: int, slot: int) -> None:
        """Copy a snapshot to a slot's state, behind what the device was given before."""
        self._copy(self._first_snapshot + snapshot, slot)

    def _copy(self, source: int, target: int) -> None:
        for pool in self._pools:
            pool[:, target].copy_(pool[:, source])
