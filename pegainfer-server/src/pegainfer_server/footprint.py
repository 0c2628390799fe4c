"""What a model will take, computed from its plan alone: weights by part, cache bytes per token, pages, longest request.

Owns the arithmetic of `pegainfer inspect`. Reads no weights and imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelPlan, WeightRule
from pegainfer_core.kv.budget import CPU_KV_CACHE_BYTES, state_budget

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
PADDING_PAGES = 1
"""Pages of the pool that hold no request's tokens."""

Device = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters whose names differ in numbers only, for example all `layers.N.mlp`."""

    name: str
    values: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one model on one kind of device."""

    device: Device
    dtype: str
    parts: tuple[Part, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int | None
    """Of the KV cache's pages; None: measured at start."""
    state_bytes_per_request: int
    """Of recurrent state; 0 for models without."""
    state_bytes: int | None
    """Of all recurrent states and snapshots of them; None: decided at start."""
    pages: int | None
    longest_request: int | None
    """Tokens of prompt and output that one request may have: what context and pages allow. None with `kv_bytes`."""


def footprint(
    plan: ModelPlan,
    device: Device,
    dtype: str,
    *,
    config: EngineConfig,
    present: Collection[str] | None,
) -> Footprint:
    """The footprint in `dtype`. `present` are the tensors of the checkpoint, None if unknown (then ties are believed).

    Raises ConfigError for flags that the model cannot honour.
    """
    width = BYTES_PER_VALUE[dtype]
    values: dict[str, int] = {}
    for rule in plan.weight_rules:
        if not is_shared(rule, present):
            name = part_name(rule.parameter)
            values[name] = values.get(name, 0) + rule.num_values
    parts = tuple(Part(name=name, values=count, bytes=count * width) for name, count in values.items())
    per_token = width * sum(group.values_per_token * len(group.layers) for group in plan.kv_groups)
    context = min(plan.max_context, config.max_model_len or plan.max_context)
    page_bytes = per_token * config.page_size
    memory = config.kv_cache_memory or (CPU_KV_CACHE_BYTES if device == "cpu" else None)
    states = state_budget(config, plan, width, memory=memory or 0, on_gpu=device == "cuda")
    kv_bytes = None if memory is None else max(0, memory - states.num_bytes)
    if kv_bytes is not None and config.kv_cache_memory is None:  # no more than all running requests could fill
        most = states.max_running_requests * -(-context // config.page_size) + PADDING_PAGES
        kv_bytes = min(kv_bytes, most * page_bytes)
    pages = None if kv_bytes is None else max(0, kv_bytes // page_bytes - PADDING_PAGES)
    return Footprint(
        device=device,
        dtype=dtype,
        parts=parts,
        weight_bytes=sum(part.bytes for part in parts),
        kv_bytes_per_token=per_token,
        kv_bytes=kv_bytes,
        state_bytes_per_request=states.bytes_per_slot,
        state_bytes=None if memory is None else states.num_bytes,
        pages=pages,
        longest_request=None if pages is None else min(context, pages * config.page_size),
    )


def is_shared(rule: WeightRule, present: Collection[str] | None) -> bool:
    """Whether a parameter takes no memory of its own, because it is tied and the checkpoint has no tensor for it."""
    if rule.tied_to is None:
        return False
    return present is None or not any(source.name in present for source in rule.sources)


def part_name(parameter: str) -> str:
    """The first two words of a parameter's name, without layer numbers and its last component."""
    words = [word for word in parameter.split(".")[:-1] if not word.isdigit()]
    return ".".join(words[:2])


def readable_bytes(count: int) -> str:
    """For example "1.50 GiB"; exact below one KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
