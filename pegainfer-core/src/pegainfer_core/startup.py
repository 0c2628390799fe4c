"""Starts an engine in this process: weights, KV cache, runner and scheduler.

Owns the order of the start and the facts reported at its end. Torch is imported inside, so that importing this module costs nothing.
Knows no family.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.errors import ConfigError
from pegainfer_core.family_calls import blamed, checked
from pegainfer_core.grammar_admission import GrammarAdmission
from pegainfer_core.grammars import Grammars
from pegainfer_core.kernel_cache import use_triton_folder
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.kv.snapshots import SnapshotPool
from pegainfer_core.messages import EngineInfo, LoadProgress
from pegainfer_core.plugins import Plugins, load_plugins
from pegainfer_core.preload import read_ahead, wake_device
from pegainfer_core.resolve import ResolvedModel, resolve_model
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.step_profiler import StepProfiler

if TYPE_CHECKING:
    from pegainfer_core.kv.storage import StateStorage
    from pegainfer_core.model import BuildContext, Model
    from pegainfer_core.ops.attention import AttentionBackend
    from pegainfer_core.placement import Placement

log = logging.getLogger(__name__)

OnProgress = Callable[[LoadProgress], None]


def start_engine(
    config: EngineConfig, on_progress: OnProgress, *, begun: float | None = None
) -> tuple[Engine, EngineInfo]:
    """Load everything and return an engine that can take requests. Raises ConfigError and its kinds.

    `begun` (perf_counter) is when the start began, if that was earlier.
    """
    clock = _Timeline(begun)
    use_triton_folder()
    waking = wake_device(config.device)
    plugins = load_plugins()
    resolved = resolve_model(config, plugins)
    read_ahead(resolved.checkpoint.path)
    import torch

    from pegainfer_core.kv.storage import StateStorage
    from pegainfer_core.memory import num_pages, reachable_model_len
    from pegainfer_core.model import BuildContext
    from pegainfer_core.ops.attention import make_attention_backend
    from pegainfer_core.ops.cpu_native import kernels
    from pegainfer_core.ops.linear_cpu import pack_linears
    from pegainfer_core.placement import place

    clock.mark("import")
    placement = place(resolved.config, resolved.plan)
    max_model_len = reachable_model_len(resolved, placement)
    context = BuildContext(device=placement.device, dtype=placement.dtype, max_model_len=max_model_len)
    try:
        model, weight_bytes = _load_model(resolved, context, on_progress)
        if placement.fused_ops and placement.device.type == "cpu":
            log.info("weights packed for this CPU: %d bytes", pack_linears(model))
            kernels(placement.dtype)  # compiled now, not in the first request
        waking.join()
        clock.mark("weights")
        on_progress(LoadProgress("kernels", 0, 0))
        backend = make_attention_backend(placement.attention_backend, placement.device)
        states = StateStorage(
            resolved.plan,
            placement.states.max_running_requests,
            placement.states.num_snapshots,
            placement.device,
            placement.dtype,
        )
        pages = num_pages(resolved, placement, model, states, backend, max_model_len)
        clock.mark("kernels")
        return _assemble(
            resolved, plugins, placement, model, states, backend, pages, max_model_len, weight_bytes, clock, on_progress
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory on {placement.device}: lower --max-prefill-tokens, --max-running-requests or "
            f"--gpu-memory-utilization, or give the KV cache less with --kv-cache-memory ({error})"
        ) from error


class _Timeline:
    """(phase, seconds) of the start."""

    def __init__(self, begun: float | None) -> None:
        self._last = time.perf_counter() if begun is None else begun
        self.phases: list[tuple[str, float]] = []

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases.append((phase, now - self._last))
        self._last = now


def _load_model(resolved: ResolvedModel, context: BuildContext, on_progress: OnProgress) -> tuple[Model, int]:
    import torch

    from pegainfer_core.model import Model
    from pegainfer_core.weights import load_weights

    family, package = resolved.family, resolved.package
    with blamed(family, package, "build", torch.OutOfMemoryError), torch.device("meta"):
        made = family.build(resolved.plan, context)
    model = checked(made, Model, family, package, "build")
    num_bytes = load_weights(
        model,
        resolved.plan,
        resolved.checkpoint.path,
        context.device,
        context.dtype,
        lambda done, total: on_progress(LoadProgress("weights", done, total)),
    )
    return model.eval(), num_bytes


def _assemble(
    resolved: ResolvedModel,
    plugins: Plugins,
    placement: Placement,
    model: Model,
    states: StateStorage,
    backend: AttentionBackend,
    num_pages: int,
    max_model_len: int,
    weight_bytes: int,
    clock: _Timeline,
    on_progress: OnProgress,
) -> tuple[Engine, EngineInfo]:
    from pegainfer_core.graphs import cuda_recorder
    from pegainfer_core.kv.storage import allocate, page_bytes
    from pegainfer_core.memory import fitting_model_len
    from pegainfer_core.runner import Runner
    from pegainfer_core.sampler import Sampler

    config = resolved.config
    budget = placement.states
    snapshots = SnapshotPool(budget.num_snapshots, budget.bytes_per_slot) if budget.bytes_per_slot else None
    if budget.bytes_per_slot and config.prefix_cache and not budget.num_snapshots:
        log.warning(
            "no prefix is cached: a snapshot of recurrent state takes %d bytes (--state-snapshot-memory)",
            budget.bytes_per_slot,
        )
    cache = KVCache(num_pages, config.page_size, config.prefix_cache, snapshots, budget.stride)
    max_model_len = fitting_model_len(config, max_model_len, cache.num_token_capacity)
    limits = SchedulerLimits(
        max_model_len=max_model_len,
        max_prefill_tokens=placement.max_prefill_tokens,
        spread_prefill=placement.spread_prefill,
        max_running_requests=budget.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        vocab_size=resolved.vocab_size,
        eos_token_ids=resolved.eos_token_ids,
        seed=config.seed,
    )
    grammars = Grammars(resolved.load_tokenizer, resolved.vocab_size, resolved.eos_token_ids)
    runner = Runner(
        model,
        allocate(resolved.plan, num_pages, config.page_size, placement.device, placement.dtype),
        states,
        backend,
        Sampler(resolved.vocab_size, resolved.eos_token_ids, placement.device, grammars),
        num_slots=budget.max_running_requests,
        max_model_len=max_model_len,
        max_prefill_tokens=placement.max_prefill_tokens,
        page_size=config.page_size,
        device=placement.device,
        recorder=cuda_recorder() if placement.cuda_graphs else None,
        fused_ops=placement.fused_ops,
    )
    clock.mark("KV cache")
    runner.prepare(lambda done, total: on_progress(LoadProgress("graphs", done, total)))
    clock.mark("graphs")
    observers = plugins.step_observers()
    if config.profile_dir is not None:
        observers = [*observers, StepProfiler(Path(config.profile_dir))]
    with blamed(resolved.family, resolved.package, "scheduler"):
        made = resolved.family.scheduler(resolved.plan, limits, cache)
    engine = Engine(
        checked(made, Scheduler, resolved.family, resolved.package, "scheduler"),
        runner,
        run_ahead=placement.run_ahead,
        grammars=GrammarAdmission(grammars),
        observers=observers,
    )
    info = EngineInfo(
        family=resolved.family.name,
        device=str(placement.device),
        dtype=placement.dtype_name,
        attention_backend=placement.attention_backend,
        max_model_len=max_model_len,
        max_prefill_tokens=placement.max_prefill_tokens,
        max_running_requests=budget.max_running_requests,
        page_size=config.page_size,
        num_pages=cache.pool.num_usable,
        vocab_size=resolved.vocab_size,
        eos_token_ids=sorted(resolved.eos_token_ids),
        weight_bytes=weight_bytes,
        kv_cache_bytes=num_pages * page_bytes(resolved.plan.kv_groups, config.page_size, placement.dtype.itemsize),
        state_bytes=budget.num_bytes,
        num_snapshots=budget.num_snapshots,
        timeline=clock.phases,
    )
    return engine, info
