"""What a process does once its start is over.

Owns that one step, for the API process and the engine's alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc


def settle() -> None:
    """Give memory that only the start needed back, and leave what lives as long as the process out of collections."""
    gc.collect()
    gc.freeze()
    gc.enable()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
