"""Slow parts of a start that need nothing from each other, done beside the rest in threads.

Owns the importing of torch, the waking of a GPU, and bringing weight files into the page cache. What fails here fails again, and is
told, where its result is used. Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from pegainfer_core.checkpoint import shard_names

READ_AHEAD_STEP = 64 << 20
CUDA_DRIVER = "libcuda.so.1"


def import_torch() -> threading.Thread:
    """Begin to import torch."""

    def work() -> None:
        import torch

        del torch

    return _beside(work)


def wake_device(name: str) -> threading.Thread:
    """Begin what steps on a CUDA device (as --device names it) wait for: its context, libraries, and Triton. Does not need torch yet."""

    def work() -> None:
        if name == "cpu" or not create_context(int(name.partition(":")[2] or 0)):
            return
        compiler = _beside(load_triton)
        import torch

        device = torch.device("cuda" if name == "auto" else name)
        with torch.inference_mode():
            one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            (one @ one).sum().item()
        compiler.join()

    return _beside(work)


def create_context(index: int) -> bool:
    """Make the primary context of a CUDA device, the one that torch will use; False where the driver has none.

    Half a second in which other threads run, unlike in most of importing torch.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch's choice, made before the driver reads it
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    steps: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), index),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    )
    return all(step() == 0 for step in steps)


def load_triton() -> None:
    """Import Triton and let it name its own version, for which it reads all of itself (0.4 GB): a kernel on disk is found by that."""
    importlib.import_module("triton")
    importlib.import_module("triton.runtime.cache").triton_key()


def read_ahead(checkpoint_path: Path) -> threading.Thread | None:
    """Begin to bring weight files into the page cache, as much as half of the memory; None where the system has no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return None

    def work() -> None:
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        for name in shard_names(checkpoint_path):
            with (checkpoint_path / name).open("rb") as opened:
                size = min(left, os.fstat(opened.fileno()).st_size)
                for offset in range(0, size, READ_AHEAD_STEP):
                    os.posix_fadvise(opened.fileno(), offset, READ_AHEAD_STEP, os.POSIX_FADV_WILLNEED)
                left -= size

    return _beside(work)


def _beside(work: Callable[[], None]) -> threading.Thread:
    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name="pegainfer-preload", daemon=True)
    thread.start()
    return thread
