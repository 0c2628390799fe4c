"""The tensors behind the pages.

Owns their layout, [pages, page size, kv heads, head dim] for keys and for values of each layer, and what a page costs. Knows nothing of
requests. The only module of `kv` that imports torch.
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
    """(keys, values) per model layer. Left as found: no position is read before it was written."""
    caches: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * plan.num_layers
    for group in plan.kv_groups:
        shape = (len(group.layers), 2, num_pages, page_size, group.num_kv_heads, group.head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        for index, layer in enumerate(group.layers):
            caches[layer] = (pool[index, 0], pool[index, 1])
    return caches
