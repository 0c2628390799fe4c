"""Where a figure comes from: commit, versions, hardware, driver, flags, time. Enough to repeat a run, and to refuse a comparison
of two that are not of one machine.

Never a path of this machine: paths are given by their last part. Machine and GPU are told apart by hashes.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SCHEMA = 1
PACKAGES = (
    "pegainfer-core",
    "pegainfer-server",
    "pegainfer-qwen3",
    "torch",
    "triton",
    "flashinfer-python",
    "transformers",
    "tokenizers",
    "numpy",
    "uvloop",
    "httptools",
)
COMMIT_VARIABLE = "PEGAINFER_COMMIT"
"""Names the commit where git is not at hand, as `git describe --always --dirty --abbrev=40` prints it."""
TOOL_SECONDS = 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CPU_INFO = Path("/proc/cpuinfo")


def provenance(command: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of this moment on this machine. `flags` must hold no secrets."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "flags": {name: plain(value) for name, value in flags.items()},
        **commit(),
        "versions": versions(),
        "python": platform.python_version(),
        "machine": machine(),
        "gpus": gpus(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def commit() -> dict[str, Any]:
    """`commit` and `dirty` of the checkout this file is part of; both None if there is none and the environment names none."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return {"commit": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    here = str(Path(__file__).parent)
    head = output(["git", "-C", here, "rev-parse", "HEAD"])
    if head is None:
        return {"commit": None, "dirty": None}
    changed = output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return {"commit": head, "dirty": bool(changed)}


def versions() -> dict[str, str]:
    """Installed packages that a figure may depend on."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The host. `id` is the same for all runs between two boots of one machine."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "id": fingerprint(BOOT_ID.read_text() if BOOT_ID.exists() else platform.node()),
    }
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text().splitlines()
        facts["cpu"] = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return facts


def gpus() -> list[dict[str, Any]]:
    """NVIDIA's GPUs as nvidia-smi tells them; empty without it."""
    query = "name,driver_version,memory.total,uuid"
    text = output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    found = []
    for line in (text or "").splitlines():
        name, driver, memory, uuid = (part.strip() for part in line.split(","))
        found.append({"name": name, "driver": driver, "memory_mib": float(memory), "id": fingerprint(uuid)})
    return found


def gpu_memory_mib() -> float | None:
    """Memory in use on all GPUs together; None where nvidia-smi does not say."""
    text = output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    try:
        return None if text is None else sum(float(line) for line in text.splitlines())
    except ValueError:
        return None


def fingerprint(text: str) -> str:
    """A short hash that tells things apart without naming them."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """A flag's value as JSON; a path, or a text that begins like one, by its last part."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, range):
        return f"{value.start}:{value.stop}"
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "./", "../", "~"))):
        return Path(value).name
    if isinstance(value, str) and "=" in value:
        name, _, rest = value.partition("=")
        return f"{name}={plain(rest)}"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def output(command: list[str]) -> str | None:
    """What a command prints; None if there is no such program or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
