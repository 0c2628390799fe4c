"""What the user said: every engine flag, frozen, one docstring per field.

Owns names, defaults and ranges of the engine's settings. Knows nothing of a family or of the machine: `None` means "decide at
start", and what was decided is in `ModelPlan` and `EngineInfo`, never written back here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pegainfer_core.errors import ConfigError
from pegainfer_core.field_types import wrong_fields

MOST: dict[str, int] = {"max_running_requests": 4096, "max_prefill_tokens": 1 << 20, "page_size": 1 << 16}
"""Largest values of the fields that buffers are sized by."""
POSITIVE = (
    "max_model_len",
    "max_prefill_tokens",
    "max_running_requests",
    "kv_cache_memory",
    "page_size",
    "state_snapshot_stride",
)

DType = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine. Every field is a flag of `pegainfer serve` with the same name in kebab case."""

    model: str
    """Checkpoint directory, or a hub id such as Qwen/Qwen3-0.6B."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) to pin; None takes the default branch."""
    device: str = "auto"
    """auto (CUDA if there is one), cpu, cuda, or cuda:N."""
    dtype: DType = "auto"
    """Type of weights and activations; auto: the checkpoint's on a GPU, float32 on CPU."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; None: the checkpoint's context, as far as the page pool holds it."""
    max_prefill_tokens: int | None = None
    """Most prompt tokens of a step (chunked prefill); None: 1024 on CPU, 3200 on a GPU. On a GPU fewer beside running streams."""
    max_running_requests: int | None = None
    """Most requests computed together; None: 32 on CPU, 256 on a GPU, fewer where their recurrent states would take too much memory."""
    max_waiting_requests: int = 10_000
    """Most requests that wait; more are refused with code queue_full."""
    page_size: int = 16
    """Tokens in one page of the KV cache."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache, recurrent states included, exactly; None: 1 GiB on CPU, measured on a GPU (see gpu_memory_utilization)."""
    gpu_memory_utilization: float = 0.90
    """Part of the GPU's memory that weights, workspace and KV cache may use together."""
    prefix_cache: bool = True
    """Reuse the pages of equal prompt prefixes."""
    state_snapshot_memory: int | None = None
    """Bytes for snapshots of recurrent state, which models that have one need to reuse prefixes; None: an eighth of the KV cache's."""
    state_snapshot_stride: int | None = None
    """Tokens that a snapshot of recurrent state must save over the one before it, in whole pages; None: 64 on CPU, 256 on a GPU."""
    run_ahead: bool | None = None
    """Launch step N+1 before the tokens of step N are on the host; None: on a GPU. Same tokens either way."""
    cuda_graphs: bool | None = None
    """Replay captured steps instead of launching kernel by kernel; None: on a GPU. Same tokens either way."""
    fused_ops: bool | None = None
    """Fused kernels, and on a CPU packed weights, in place of plain torch operations; None: yes. Same results up to rounding."""
    attention_backend: Literal["auto", "torch", "torch-batched", "triton"] = "auto"
    """auto: triton on CUDA, torch-batched on CPU; torch is the plain one, row by row."""
    profile_dir: str | None = None
    """Directory for traces by torch's profiler: of steps 10 to 29, and of 20 more whenever the engine's process gets SIGUSR1."""
    seed: int = 0
    """Seed from which requests without a seed of their own draw one."""
    ignore_config_keys: tuple[str, ...] = ()
    """Keys of config.json that may be ignored although the family does not know them."""
    options: dict[str, str] = {}
    """Family options (-o name=value), still as text; the family's dataclass gives the types."""

    def __post_init__(self) -> None:
        """Raise ConfigError naming the flag that is of another type or out of range."""
        for name, problem in wrong_fields(self):
            raise ConfigError(f"{name if name == 'model' else _flag(name)} {problem}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {value}")
            if value is not None and value > MOST.get(name, value):
                raise ConfigError(f"{_flag(name)} must be at most {MOST[name]}, got {value}")
        if self.state_snapshot_memory is not None and self.state_snapshot_memory < 0:
            raise ConfigError(f"--state-snapshot-memory must be 0 or more, got {self.state_snapshot_memory}")
        if self.state_snapshot_stride is not None and self.state_snapshot_stride % self.page_size:
            raise ConfigError(
                f"--state-snapshot-stride must be a multiple of --page-size {self.page_size}, got {self.state_snapshot_stride}"
            )
        if self.max_waiting_requests < 0:
            raise ConfigError(f"--max-waiting-requests must be 0 or more, got {self.max_waiting_requests}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size must be a power of two, got {self.page_size}")


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
