"""What this machine offers the engine, as one JSON object on stdout: `python -m pegainfer_core.environment`.

Owns the questions to torch, CUDA and the kernel packages. Run in a process of its own by `pegainfer doctor`, so that a broken
installation of any of them is a finding, not a crash.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pegainfer_core.kernel_cache import c_compiler, flashinfer_folder, kernel_cache, triton_cache

KERNEL_PACKAGES = ("triton", "flashinfer")


def inspect_environment() -> dict[str, Any]:
    """Torch, devices, kernel packages, their compiler and caches. A part that fails has `error` instead of its facts."""
    return {
        "torch": _torch(),
        "packages": {name: _package(name) for name in KERNEL_PACKAGES},
        "c_compiler": c_compiler(),
        "caches": _caches(),
    }


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
    found = {"triton": triton_cache(), "flashinfer": kernel_cache(flashinfer_folder(), "*.so")}
    return {
        name: {"folder": str(cache.folder), "kernels": cache.num_kernels, "bytes": cache.num_bytes}
        for name, cache in found.items()
    }


if __name__ == "__main__":
    json.dump(inspect_environment(), sys.stdout)
