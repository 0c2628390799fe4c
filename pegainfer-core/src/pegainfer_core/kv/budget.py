"""How much of the KV memory goes to recurrent states and their snapshots; pages get the rest.

Owns the shares, and the defaults that they start from. Imports no torch, so that `pegainfer inspect` does the same arithmetic as a start.
"""

from __future__ import annotations

import dataclasses

from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.family import ModelPlan

CPU_KV_CACHE_BYTES = 1 << 30
CPU_RUNNING_REQUESTS = 32
GPU_RUNNING_REQUESTS = 256
CPU_SNAPSHOT_STRIDE = 64
GPU_SNAPSHOT_STRIDE = 256
"""A prompt that is cut for a snapshot takes a step more, which costs a GPU the time of some hundred prompt tokens, a CPU of a few."""
STATES_SHARE = 3 / 8
"""Of the memory, at most, for the states of running requests, where nobody says how many may run."""
SNAPSHOTS_SHARE = 1 / 8
SNAPSHOTS_PER_REQUEST = 4
"""No more than so many times the running requests, where nobody says how much memory snapshots get."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateBudget:
    """Slots for states. All 0 but the first for models without recurrent state."""

    max_running_requests: int
    num_snapshots: int = 0
    bytes_per_slot: int = 0
    stride: int = 0
    """Tokens that a snapshot must save."""

    @property
    def num_bytes(self) -> int:
        """Of all slots: one for each running request, one for padding, and the snapshots."""
        return (self.max_running_requests + 1 + self.num_snapshots) * self.bytes_per_slot


def state_budget(config: EngineConfig, plan: ModelPlan, itemsize: int, *, memory: int, on_gpu: bool) -> StateBudget:
    """Divide about `memory` bytes. Raises ConfigError for flags that this model cannot honour.

    A request needs a slot to run, so without --max-running-requests there are as many as the memory allows, up to the device's default.
    """
    default_running = GPU_RUNNING_REQUESTS if on_gpu else CPU_RUNNING_REQUESTS
    per_slot = sum(group.bytes_per_slot(itemsize) for group in plan.kv_groups)
    given = [name for name in ("state_snapshot_memory", "state_snapshot_stride") if getattr(config, name) is not None]
    if given and not (per_slot and config.prefix_cache):
        flag = f"--{given[0].replace('_', '-')}"
        why = "needs the prefix cache" if per_slot else f"is not used by {plan.family}: it has no recurrent state"
        raise ConfigError(f"{flag} {why}")
    if not per_slot:
        return StateBudget(max_running_requests=config.max_running_requests or default_running)
    fitting = int(memory * STATES_SHARE) // per_slot - 1
    running = config.max_running_requests or max(1, min(default_running, fitting))
    if not config.prefix_cache:
        snapshots = 0
    elif config.state_snapshot_memory is not None:
        snapshots = config.state_snapshot_memory // per_slot
    else:
        snapshots = min(SNAPSHOTS_PER_REQUEST * running, max(0, int(memory * SNAPSHOTS_SHARE)) // per_slot)
    stride = config.state_snapshot_stride or max(
        GPU_SNAPSHOT_STRIDE if on_gpu else CPU_SNAPSHOT_STRIDE, config.page_size
    )
    return StateBudget(max_running_requests=running, num_snapshots=snapshots, bytes_per_slot=per_slot, stride=stride)
