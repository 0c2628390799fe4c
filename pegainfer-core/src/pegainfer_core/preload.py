"""Slow parts of a start that need nothing from each other, done beside the rest in threads.

Owns the importing of torch, the waking of a GPU, and bringing weight files into the page cache. What fails here fails again, and is
told, where its result is used. Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path

from pegainfer_core.checkpoint import weight_files

READ_AHEAD_STEP = 64 << 20


def import_torch() -> threading.Thread:
    """Begin to import torch."""

    def work() -> None:
        import torch

        del torch

    return _beside(work)


def wake_device(name: str) -> threading.Thread:
    """Begin to create the context of a CUDA device (as --device names it) and to load what every step needs there."""

    def work() -> None:
        import torch

        if name == "cpu" or not torch.cuda.is_available():
            return
        device = torch.device("cuda" if name == "auto" else name)
        with torch.inference_mode():
            one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            (one @ one).sum().item()
        if importlib.util.find_spec("triton") is not None:
            importlib.import_module("triton")

    return _beside(work)


def read_ahead(checkpoint_path: Path) -> threading.Thread | None:
    """Begin to bring weight files into the page cache, as much as half of the memory; None where the system has no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return None

    def work() -> None:
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        for file in sorted(set(weight_files(checkpoint_path).values())):
            with file.open("rb") as opened:
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
