"""Whether an operation may take its fast path: the one place that looks at devices, types and what is installed.

Every fast path gives what the plain one beside it gives, up to rounding, and can be turned off with `fast_ops(False)`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_fast_ops = ContextVar("fast_ops", default=True)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextlib.contextmanager
def fast_ops(enabled: bool) -> Iterator[None]:
    """Within this context of this thread, operations take fast paths, or (False) the plain torch ones only."""
    token = _fast_ops.set(enabled)
    try:
        yield
    finally:
        _fast_ops.reset(token)


def use_triton(x: Tensor) -> bool:
    """Whether our Triton kernels may work on `x`: a dense last dimension, on a GPU they are made for."""
    return (
        x.device.type == "cuda"
        and _fast_ops.get()
        and x.dtype in _DTYPES
        and x.stride(-1) == 1
        and x.numel() > 0
        and _supported(x.device)
    )


def use_cpu(x: Tensor) -> bool:
    """Whether the CPU's own ways (ops/token_cpu.py) may be taken for `x`."""
    return x.device.type == "cpu" and _fast_ops.get()


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@functools.cache
def _supported(device: torch.device) -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
