"""Memory of this machine, or of the container around this process. Owns the question to the system; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_memory(cgroup_limit: Path = CGROUP_LIMIT) -> int:
    """Bytes this process could have at most."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(cgroup_limit.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such group, or "max"
        return total


def check_kv_cache_memory(config: EngineConfig, total: int, where: str) -> None:
    """Raise ConfigError if --kv-cache-memory asks for more than all of the memory there is."""
    if config.kv_cache_memory is not None and config.kv_cache_memory > total:
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} is more than the {total} bytes of memory that {where} has"
        )
