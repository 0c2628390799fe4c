"""Where compiled kernels are kept between starts, and what is there.

Owns the folder. Triton itself keys what it keeps by source, versions, compiler and card, so that one folder serves all machines
that share it. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

CACHE_VARIABLE = "PEGAINFER_CACHE"
TRITON_VARIABLE = "TRITON_CACHE_DIR"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelCache:
    """A folder of kernels."""

    folder: Path
    num_kernels: int
    num_bytes: int


def triton_folder() -> Path:
    """$TRITON_CACHE_DIR, else `triton` in $PEGAINFER_CACHE, else ~/.cache/pegainfer/triton."""
    chosen = os.environ.get(TRITON_VARIABLE)
    if chosen:
        return Path(chosen)
    ours = os.environ.get(CACHE_VARIABLE)
    return (Path(ours) if ours else Path.home() / ".cache" / "pegainfer") / "triton"


def use_triton_folder() -> None:
    """Tell Triton, before it is imported, to keep its kernels there."""
    os.environ.setdefault(TRITON_VARIABLE, str(triton_folder()))


def flashinfer_folder() -> Path:
    """Where FlashInfer builds its kernels."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"


def kernel_cache(folder: Path, pattern: str) -> KernelCache:
    """Count the files of a cache; those that match `pattern` are kernels."""
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return KernelCache(
        folder=folder,
        num_kernels=sum(file.match(pattern) for file in files),
        num_bytes=sum(file.stat().st_size for file in files),
    )


def triton_cache() -> KernelCache:
    """What Triton has compiled for CUDA cards."""
    return kernel_cache(triton_folder(), "*.cubin")


def c_compiler() -> str | None:
    """The compiler that Triton builds its launchers with, as Triton looks for it: $CC, gcc, clang; None if there is none."""
    chosen = os.environ.get("CC")
    if chosen:
        return shutil.which(chosen)
    return shutil.which("gcc") or shutil.which("clang")
