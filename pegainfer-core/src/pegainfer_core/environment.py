"""What this machine offers the engine, as one JSON object on stdout: `python -m pegainfer_core.environment`.

Owns the questions to torch, CUDA and the kernel packages. Run in a process of its own by `pegainfer doctor`, so that a broken
installation of any of them is a finding, not a crash.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

KERNEL_PACKAGES = ("triton", "flashinfer")


def inspect_environment() -> dict[str, Any]:
    """Torch, devices, kernel packages and caches. A part that fails has `error` instead of its facts."""
    return {"torch": _torch(), "packages": {name: _package(name) for name in KERNEL_PACKAGES}, "caches": _caches()}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # ImportError, or OSError for a library that does not load
        return {"error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "built_for_cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "devices": [],
    }
    if torch.version.cuda is None:
        return facts
    try:
        if not torch.cuda.is_available():
            torch.zeros(1, device="cuda")  # says why
        facts["devices"] = [_device(torch, index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        facts["cuda_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return facts


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    name = f"sm_{major}{minor}"
    return {
        "index": index,
        "name": properties.name,
        "compute_capability": f"{major}.{minor}",
        "supported_by_torch": any(
            known == name or known.startswith(f"sm_{major}") for known in torch.cuda.get_arch_list()
        ),
        "free_bytes": free,
        "total_bytes": total,
    }


def _package(name: str) -> dict[str, Any]:
    if importlib.util.find_spec(name) is None:
        return {"installed": False}
    try:
        importlib.import_module(name)
    except Exception as error:
        return {"installed": True, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    for distribution in (name, f"{name}-python"):
        try:
            return {"installed": True, "version": version(distribution)}
        except PackageNotFoundError:
            continue
    return {"installed": True, "version": None}


def _caches() -> dict[str, Any]:
    """Compiled kernels found on disk, by package."""
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    flashinfer = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
    return {"triton": _count(triton, "*.cubin"), "flashinfer": _count(flashinfer, "*.so")}


def _count(folder: Path, pattern: str) -> dict[str, Any]:
    return {"folder": str(folder), "kernels": sum(1 for _ in folder.rglob(pattern)) if folder.is_dir() else 0}


if __name__ == "__main__":
    json.dump(inspect_environment(), sys.stdout)
