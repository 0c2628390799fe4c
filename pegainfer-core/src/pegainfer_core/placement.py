"""Where a model runs and in which type: the decisions that `auto` stands for.

Owns devices, types, the attention backend and the defaults that depend on the device; the one place that asks for a compute capability.
Knows nothing of weights or pages.
"""

from __future__ import annotations

import dataclasses

import torch

from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.family import ModelPlan
from pegainfer_core.kv.budget import CPU_KV_CACHE_BYTES, StateBudget, state_budget
from pegainfer_core.machine import check_kv_cache_memory, machine_memory

MIN_COMPUTE_CAPABILITY = (8, 0)
CPU_PREFILL_TOKENS = 1024
GPU_PREFILL_TOKENS = 3200
"""With 128 rows beside them, 26 matrix tiles of 128 rows: few of an H200's 132 processors idle in the last wave."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device and types, decided."""

    device: torch.device
    total_memory: int
    """Bytes that the device has, in use or not."""
    dtype: torch.dtype
    dtype_name: str
    attention_backend: str
    max_prefill_tokens: int
    spread_prefill: bool
    states: StateBudget
    run_ahead: bool
    cuda_graphs: bool
    fused_ops: bool


def place(config: EngineConfig, plan: ModelPlan) -> Placement:
    """Decide. Raises ConfigError naming the flag that cannot be honoured."""
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
        dtype_name = plan.dtype if device.type == "cuda" else "float32"
    backend = config.attention_backend
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "torch-batched"
    if backend == "triton" and device.type != "cuda":
        raise ConfigError("--attention-backend triton needs a CUDA device; use torch-batched or torch")
    if backend == "torch-batched" and device.type != "cpu":
        raise ConfigError("--attention-backend torch-batched is for CPUs; use triton or torch")
    on_gpu = device.type == "cuda"
    if config.cuda_graphs and not on_gpu:
        raise ConfigError("--cuda-graphs needs a CUDA device")
    total_memory = torch.cuda.mem_get_info(device)[1] if on_gpu else machine_memory()
    check_kv_cache_memory(config, total_memory, str(device) if on_gpu else "this machine")
    dtype: torch.dtype = getattr(torch, dtype_name)
    return Placement(
        device=device,
        total_memory=total_memory,
        dtype=dtype,
        dtype_name=dtype_name,
        attention_backend=backend,
        max_prefill_tokens=config.max_prefill_tokens or (GPU_PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS),
        spread_prefill=on_gpu,
        states=state_budget(
            config,
            plan,
            dtype.itemsize,
            memory=_kv_memory(config, plan, dtype.itemsize, total_memory if on_gpu else None),
            on_gpu=on_gpu,
        ),
        run_ahead=on_gpu if config.run_ahead is None else config.run_ahead,
        cuda_graphs=on_gpu if config.cuda_graphs is None else config.cuda_graphs,
        fused_ops=True if config.fused_ops is None else config.fused_ops,
    )


def _kv_memory(config: EngineConfig, plan: ModelPlan, itemsize: int, gpu_memory: int | None) -> int:
    """About the bytes that pages and states can have; on a GPU before the model is loaded, so that workspace is not known yet."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if gpu_memory is None:
        return CPU_KV_CACHE_BYTES
    weights = sum(rule.num_values for rule in plan.weight_rules if rule.tied_to is None) * itemsize
    return int(gpu_memory * config.gpu_memory_utilization) - weights


def _check_cuda(device: torch.device) -> torch.device:
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise ConfigError(f"--device {device}: this machine has {count} CUDA devices (pegainfer doctor tells more)")
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"cuda:{index} has compute capability {capability[0]}.{capability[1]}; 8.0 or newer is needed"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
