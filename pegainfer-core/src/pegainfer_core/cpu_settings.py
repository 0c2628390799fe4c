"""How many threads an engine's process computes with, and how they wait: environment variables that its libraries read when loaded.

Owns the defaults and the questions to Linux behind them. What the user set stays. Imports no torch; knows no engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = 10_000
"""Rounds that an idle OpenMP thread looks for work before it sleeps. GOMP's own 300,000 (milliseconds) leave no core to whatever else
runs: see docs/LOG.md for what each count costs."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Large blocks of memory on huge pages where the system allows it: up to 18 % of a decode step."""

SYSTEM = Path("/sys")
GPU_DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver runs."""


def engine_settings(given: Mapping[str, str], system: Path = SYSTEM, driver: Path = GPU_DRIVER) -> dict[str, str]:
    """Variables to add to `given`, the environment of this process, for a process that will compute.

    Huge pages only where no GPU could be the one that computes: its engine would hold more memory for nothing.
    """
    settings: dict[str, str] = {}
    if not any(given.get(name) for name in THREAD_VARIABLES):
        settings["OMP_NUM_THREADS"] = str(num_cores(system))
    if not any(given.get(name) for name in WAIT_VARIABLES):
        settings["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    tunables = given.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables and not driver.exists():
        settings["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}" if tunables else HUGE_PAGES
    return settings


def num_cores(system: Path = SYSTEM) -> int:
    """Physical cores this process may use: two threads of one core share the units that matrix products need. At least 1."""
    if not hasattr(os, "sched_getaffinity"):  # no Linux
        return os.cpu_count() or 1
    cores = {_core_of(processor, system) for processor in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota(system) or len(cores)))


def _core_of(processor: int, system: Path) -> str:
    """A name that is the same for all processors of one core."""
    try:
        topology = system / f"devices/system/cpu/cpu{processor}/topology"
        return (topology / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(processor)


def _quota(system: Path) -> int | None:
    """Whole CPUs that the container around this process may use; None: no limit is known."""
    try:
        quota, period = (system / "fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such group, or "max"
        return None
