"""How many pages the KV cache gets: measured on a GPU, stated on CPU.

Owns the profile of the largest step and the arithmetic of what is left. Knows no family.
"""

from __future__ import annotations

import torch

from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.kv.budget import CPU_KV_CACHE_BYTES
from pegainfer_core.kv.storage import StateStorage, allocate, page_bytes
from pegainfer_core.model import Model
from pegainfer_core.ops.attention import AttentionBackend
from pegainfer_core.placement import Placement, place
from pegainfer_core.plan import Join, Row, StepPlan
from pegainfer_core.resolve import ResolvedModel
from pegainfer_core.runner import Runner
from pegainfer_core.sampler import Sampler
from pegainfer_core.sampling_params import SamplingParams

GPU_GRAPHS_BYTES = 400 << 20
GPU_MARGIN_BYTES = 150 << 20
"""Kept free for what a profile does not see: fragmentation, the driver's own allocations."""


def check_flags(resolved: ResolvedModel) -> None:
    """Raise ConfigError for flags that this machine cannot honour. A GPU may be asked about on a machine without."""
    if not resolved.config.device.startswith("cuda") or torch.cuda.is_available():
        reachable_model_len(resolved, place(resolved.config, resolved.plan))


def reachable_model_len(resolved: ResolvedModel, placement: Placement) -> int:
    """The context that is wanted, as far as the pool could ever hold it: bounds tables and buffers before the pool is known.

    Raises ConfigError if --max-model-len asks for more, or not even a page fits.
    """
    config = resolved.config
    on_gpu = placement.device.type == "cuda"
    budget = config.kv_cache_memory or (placement.total_memory if on_gpu else CPU_KV_CACHE_BYTES)
    per_page = page_bytes(resolved.plan.kv_groups, config.page_size, placement.dtype.itemsize)
    capacity = (_pages(config, placement, budget - placement.states.num_bytes, per_page) - 1) * config.page_size
    return fitting_model_len(config, config.max_model_len or resolved.plan.max_context, capacity)


def fitting_model_len(config: EngineConfig, wanted: int, capacity: int) -> int:
    """What of `wanted` tokens a pool of `capacity` holds. Raises ConfigError where the user asked for them."""
    if capacity < wanted and config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit: the KV cache holds {capacity} tokens; "
            "lower it, or raise --kv-cache-memory or --gpu-memory-utilization"
        )
    return min(wanted, capacity)


def num_pages(
    resolved: ResolvedModel,
    placement: Placement,
    model: Model,
    states: StateStorage,
    backend: AttentionBackend,
    max_model_len: int,
) -> int:
    """Pages of the pool, the padding page included. `states` are used, and left with anything in them."""
    config = resolved.config
    per_page = page_bytes(resolved.plan.kv_groups, config.page_size, placement.dtype.itemsize)
    on_gpu = placement.device.type == "cuda"
    budget = (config.kv_cache_memory or CPU_KV_CACHE_BYTES) - placement.states.num_bytes
    if on_gpu:
        measured = _measure_free(resolved, placement, model, states, backend, max_model_len)
        if config.kv_cache_memory is None:
            budget = measured  # the states are there already
    num_pages = _pages(config, placement, budget, per_page)
    most = placement.states.max_running_requests * -(-max_model_len // config.page_size) + 1
    return num_pages if config.kv_cache_memory else min(num_pages, most)


def _pages(config: EngineConfig, placement: Placement, budget: int, per_page: int) -> int:
    """Pages that fit into what is left beside the states."""
    if budget // per_page < 2:
        measured = placement.device.type == "cuda" and config.kv_cache_memory is None
        hint = "raise --gpu-memory-utilization or lower --max-prefill-tokens" if measured else "raise --kv-cache-memory"
        states = placement.states
        taken = ""
        if states.num_bytes:
            taken = (
                f" (recurrent states take {states.num_bytes}: {states.max_running_requests} running requests, padding and "
                f"{states.num_snapshots} snapshots of {states.bytes_per_slot} each)"
            )
            hint += ", or lower --max-running-requests or --state-snapshot-memory"
        raise ConfigError(
            f"{max(budget, 0)} bytes are left for the KV cache{taken} and a page takes {per_page}; at least 2 are needed: {hint}"
        )
    return budget // per_page


def _measure_free(
    resolved: ResolvedModel,
    placement: Placement,
    model: Model,
    states: StateStorage,
    backend: AttentionBackend,
    max_model_len: int,
) -> int:
    """Bytes of the GPU left for pages after the largest step was run once (which also compiles the kernels)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _largest_step(resolved, placement, model, states, backend, max_model_len)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    graphs = 0
    if placement.cuda_graphs:
        # Their pool holds a step's tensors once more; then the shared logits, and what the driver takes for the graphs.
        graphs = peak + placement.states.max_running_requests * resolved.plan.vocab_size * placement.dtype.itemsize
        graphs += GPU_GRAPHS_BYTES
    utilization = resolved.config.gpu_memory_utilization
    return int(total * utilization) - (total - free) - peak - graphs - GPU_MARGIN_BYTES


def _largest_step(
    resolved: ResolvedModel,
    placement: Placement,
    model: Model,
    states: StateStorage,
    backend: AttentionBackend,
    max_model_len: int,
) -> None:
    """Prompts that fill the token budget beside single-token rows in all other slots, on a pool of one scratch page."""
    page_size = resolved.config.page_size
    caches = allocate(resolved.plan, 2, page_size, placement.device, placement.dtype)
    for keys, values in caches:
        keys.zero_()
        values.zero_()
    slots = placement.states.max_running_requests
    runner = Runner(
        model,
        caches,
        states,
        backend,
        Sampler(resolved.vocab_size, resolved.eos_token_ids, placement.device),
        num_slots=slots,
        max_model_len=max_model_len,
        max_prefill_tokens=placement.max_prefill_tokens,
        page_size=page_size,
        device=placement.device,
        fused_ops=placement.fused_ops,
    )
    lengths: list[int] = []
    left = placement.max_prefill_tokens
    while left and len(lengths) < slots:
        lengths.append(min(left, max_model_len))
        left -= lengths[-1]
    lengths = sorted([1] * (slots - len(lengths)) + lengths, key=lambda length: length > 1)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    plan = StepPlan(
        index=0,
        joins=[Join(slot=slot, params=params, seed=0, prompt_ids=[0], output_ids=[]) for slot in range(len(lengths))],
        rows=[
            Row(
                slot=slot,
                start=0,
                num_tokens=length,
                token_ids=[0] * length,
                new_pages=[1] * -(-length // page_size),
                samples=True,
                output_index=0,
            )
            for slot, length in enumerate(lengths)
        ],
    )
    runner.launch(plan).wait()
