"""Starts an engine in this process: device, weights, KV cache sized by what is left, runner and scheduler.

Owns every decision that `auto` stands for. Torch is imported inside, so that importing this module costs nothing. Knows no family.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.errors import ConfigError
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.messages import EngineInfo, LoadProgress
from pegainfer_core.plan import Join, Row, StepPlan
from pegainfer_core.plugins import Plugins, load_plugins
from pegainfer_core.resolve import ResolvedModel, resolve_model
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import SchedulerLimits

if TYPE_CHECKING:
    import torch

    from pegainfer_core.model import BuildContext, Model
    from pegainfer_core.ops.attention import AttentionBackend

CPU_KV_CACHE_BYTES = 1 << 30
GPU_MARGIN_BYTES = 150 << 20
"""Kept free for what a profile does not see: fragmentation, the driver's own allocations."""

OnProgress = Callable[[LoadProgress], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device and types, decided."""

    device: torch.device
    dtype: torch.dtype
    dtype_name: str
    attention_backend: str
    max_prefill_tokens: int
    max_running_requests: int


def start_engine(config: EngineConfig, on_progress: OnProgress) -> tuple[Engine, EngineInfo]:
    """Load everything and return an engine that can take requests. Raises ConfigError and its kinds."""
    clock = _Timeline()
    plugins = load_plugins()
    resolved = resolve_model(config, plugins)
    import torch

    from pegainfer_core.model import BuildContext
    from pegainfer_core.ops.attention import make_attention_backend

    clock.mark("import")
    placement = _place(resolved)
    max_model_len = _wanted_model_len(resolved)
    context = BuildContext(device=placement.device, dtype=placement.dtype, max_model_len=max_model_len)
    try:
        model, weight_bytes = _load_model(resolved, context, on_progress)
        clock.mark("weights")
        backend = make_attention_backend(placement.attention_backend, placement.device)
        num_pages = _num_pages(resolved, placement, model, backend, max_model_len)
        clock.mark("warm-up")
        return _assemble(resolved, plugins, placement, model, backend, num_pages, max_model_len, weight_bytes, clock)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory on {placement.device}: lower --max-prefill-tokens, --max-running-requests or "
            f"--gpu-memory-utilization, or give the KV cache less with --kv-cache-memory ({error})"
        ) from error


class _Timeline:
    """(phase, seconds) of the start."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.phases: list[tuple[str, float]] = []

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases.append((phase, now - self._last))
        self._last = now


def _place(resolved: ResolvedModel) -> Placement:
    import torch

    config = resolved.config
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {config.device}: not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {config.device} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        device = _check_cuda(device)
    dtype_name = config.dtype
    if dtype_name == "auto":
        dtype_name = resolved.plan.dtype if device.type == "cuda" else "float32"
    backend = config.attention_backend
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "torch"
    if backend == "triton" and device.type != "cuda":
        raise ConfigError("--attention-backend triton needs a CUDA device; use torch")
    on_gpu = device.type == "cuda"
    return Placement(
        device=device,
        dtype=getattr(torch, dtype_name),
        dtype_name=dtype_name,
        attention_backend=backend,
        max_prefill_tokens=config.max_prefill_tokens or (8192 if on_gpu else 1024),
        max_running_requests=config.max_running_requests or (256 if on_gpu else 32),
    )


def _check_cuda(device: torch.device) -> torch.device:
    import torch

    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise ConfigError(f"--device {device}: this machine has {count} CUDA devices (pegainfer doctor tells more)")
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        raise ConfigError(
            f"cuda:{index} has compute capability {capability[0]}.{capability[1]}; 8.0 or newer is needed"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _wanted_model_len(resolved: ResolvedModel) -> int:
    longest = resolved.plan.max_context
    wanted = resolved.config.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {longest} positions of this checkpoint (config.json)")
    return wanted or longest


def _load_model(resolved: ResolvedModel, context: BuildContext, on_progress: OnProgress) -> tuple[Model, int]:
    import torch

    from pegainfer_core.kv.storage import check_groups
    from pegainfer_core.weights import load_weights

    check_groups(resolved.plan)
    with torch.device("meta"):
        model = resolved.family.build(resolved.plan, context)
    num_bytes = load_weights(
        model,
        resolved.plan,
        resolved.checkpoint.path,
        context.device,
        context.dtype,
        lambda done, total: on_progress(LoadProgress("weights", done, total)),
    )
    return model.eval(), num_bytes


def _num_pages(
    resolved: ResolvedModel, placement: Placement, model: Model, backend: AttentionBackend, max_model_len: int
) -> int:
    """Pages of the pool, the padding page included."""
    from pegainfer_core.kv.storage import page_bytes

    config = resolved.config
    per_page = page_bytes(resolved.plan.kv_groups, config.page_size, placement.dtype.itemsize)
    if placement.device.type == "cuda":
        measured = _measure_free(resolved, placement, model, backend, max_model_len)
        hint = "raise --gpu-memory-utilization or lower --max-prefill-tokens"
    else:
        measured = CPU_KV_CACHE_BYTES
        hint = "raise --kv-cache-memory"
    budget = config.kv_cache_memory or measured
    num_pages = budget // per_page
    if num_pages < 2:
        raise ConfigError(
            f"{max(budget, 0)} bytes are left for the KV cache and a page takes {per_page}; at least 2 are needed: {hint}"
        )
    most = placement.max_running_requests * -(-max_model_len // config.page_size) + 1
    return num_pages if config.kv_cache_memory else min(num_pages, most)


def _measure_free(
    resolved: ResolvedModel, placement: Placement, model: Model, backend: AttentionBackend, max_model_len: int
) -> int:
    """Bytes of the GPU left for pages after the largest step was run once (which also compiles the kernels)."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _largest_step(resolved, placement, model, backend, max_model_len)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    utilization = resolved.config.gpu_memory_utilization
    return int(total * utilization) - (total - free) - peak - GPU_MARGIN_BYTES


def _largest_step(
    resolved: ResolvedModel, placement: Placement, model: Model, backend: AttentionBackend, max_model_len: int
) -> None:
    """Prompts that fill the token budget beside single-token rows in all other slots, on a pool of one scratch page."""
    from pegainfer_core.kv.storage import allocate
    from pegainfer_core.runner import Runner
    from pegainfer_core.sampler import Sampler

    page_size = resolved.config.page_size
    caches = allocate(resolved.plan, 2, page_size, placement.device, placement.dtype)
    for keys, values in caches:
        keys.zero_()
        values.zero_()
    slots = placement.max_running_requests
    runner = Runner(
        model,
        caches,
        backend,
        Sampler(resolved.vocab_size, resolved.eos_token_ids, placement.device),
        num_slots=slots,
        max_model_len=max_model_len,
        page_size=page_size,
        device=placement.device,
    )
    lengths: list[int] = []
    left = placement.max_prefill_tokens
    while left and len(lengths) < slots:
        lengths.append(min(left, max_model_len))
        left -= lengths[-1]
    lengths = [1] * (slots - len(lengths)) + lengths
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


def _assemble(
    resolved: ResolvedModel,
    plugins: Plugins,
    placement: Placement,
    model: Model,
    backend: AttentionBackend,
    num_pages: int,
    max_model_len: int,
    weight_bytes: int,
    clock: _Timeline,
) -> tuple[Engine, EngineInfo]:
    from pegainfer_core.kv.storage import allocate, page_bytes
    from pegainfer_core.runner import Runner
    from pegainfer_core.sampler import Sampler

    config = resolved.config
    cache = KVCache(num_pages, config.page_size, config.prefix_cache)
    if cache.num_token_capacity < max_model_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"--max-model-len {max_model_len} does not fit: the KV cache holds {cache.num_token_capacity} tokens; "
                "lower it, or raise --kv-cache-memory or --gpu-memory-utilization"
            )
        max_model_len = cache.num_token_capacity
    limits = SchedulerLimits(
        max_model_len=max_model_len,
        max_prefill_tokens=placement.max_prefill_tokens,
        max_running_requests=placement.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        vocab_size=resolved.vocab_size,
        eos_token_ids=resolved.eos_token_ids,
        seed=config.seed,
    )
    runner = Runner(
        model,
        allocate(resolved.plan, num_pages, config.page_size, placement.device, placement.dtype),
        backend,
        Sampler(resolved.vocab_size, resolved.eos_token_ids, placement.device),
        num_slots=placement.max_running_requests,
        max_model_len=max_model_len,
        page_size=config.page_size,
        device=placement.device,
    )
    clock.mark("KV cache")
    engine = Engine(
        resolved.family.scheduler(resolved.plan, limits, cache),
        runner,
        run_ahead=config.run_ahead,
        observers=plugins.step_observers(),
    )
    info = EngineInfo(
        family=resolved.family.name,
        device=str(placement.device),
        dtype=placement.dtype_name,
        attention_backend=placement.attention_backend,
        max_model_len=max_model_len,
        max_prefill_tokens=placement.max_prefill_tokens,
        max_running_requests=placement.max_running_requests,
        page_size=config.page_size,
        num_pages=cache.pool.num_usable,
        vocab_size=resolved.vocab_size,
        eos_token_ids=sorted(resolved.eos_token_ids),
        weight_bytes=weight_bytes,
        kv_cache_bytes=num_pages * page_bytes(resolved.plan.kv_groups, config.page_size, placement.dtype.itemsize),
        timeline=clock.phases,
    )
    return engine, info
