"""Compile the attention kernels for GPUs that are not there: `python -m pegainfer_core.testing.kernel_compile`.

Owns a stand-in for Triton's driver that names a target, and a recorder that turns launches into compilations, so the real
backend decides what is compiled. A process of its own, without TRITON_INTERPRET. Prints one JSON line for each kernel.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pegainfer_core.ops import attention_triton
from pegainfer_core.testing.paged_attention import paged_batch

CAPABILITIES = (80, 90)
SHAPES = [
    # dtype, head dim, rows of (new tokens, context): long rows are split, 200 new tokens take the largest tile
    (torch.bfloat16, 128, [(1, 40), (1, 9000), (200, 300)]),
    (torch.bfloat16, 256, [(1, 40), (200, 300)]),
    (torch.float16, 80, [(1, 40), (12, 40)]),
    (torch.float32, 128, [(1, 40), (200, 300)]),
]


class _OfflineDriver:
    """As much of a driver as compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self._device = capability

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


class _CompileOnly:
    """Stands for a kernel: a launch compiles it and reports what it needs."""

    def __init__(self, kernel: Any, report: Callable[[Any], None]) -> None:
        self._kernel = kernel
        self._report = report

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._report(self._kernel.warmup(*args, grid=grid, **options))


def main() -> None:
    """Compile every launch of SHAPES for every capability."""
    kernels = {name: getattr(attention_triton, name) for name in ("attend_kernel", "merge_kernel", "write_kernel")}
    for capability, (dtype, head_dim, rows) in itertools.product(CAPABILITIES, SHAPES):
        facts = {"capability": capability, "dtype": str(dtype), "head_dim": head_dim}
        driver.set_active(_OfflineDriver(capability))
        for name, kernel in kernels.items():
            setattr(attention_triton, name, _CompileOnly(kernel, functools.partial(_report, facts)))
        batch = paged_batch(rows, heads=(8, 2), head_dim=head_dim, page_size=16, dtype=dtype)
        batch.run(attention_triton.TritonAttention(torch.device("cpu")))


def _report(facts: dict[str, Any], compiled: Any) -> None:
    needs = {"kernel": compiled.metadata.name, "shared": compiled.metadata.shared, "image": len(compiled.asm["cubin"])}
    sys.stdout.write(json.dumps(facts | needs) + "\n")


if __name__ == "__main__":
    main()
