"""Compile our Triton kernels for GPUs that are not there: `python -m pegainfer_core.testing.kernel_compile`.

Owns a stand-in for Triton's driver that names a target, and a recorder that turns launches into compilations, so the real
backend decides what is compiled. A process of its own, without TRITON_INTERPRET. Prints one JSON line for each kernel.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pegainfer_core.ops import attention_triton, gdn_triton, latent_triton, linear_triton, moe_triton, token_triton
from pegainfer_core.ops.attention import StackedHeads
from pegainfer_core.ops.linear_tiles import LinearTile, choose_tile
from pegainfer_core.testing.gated_delta_net import layer_case
from pegainfer_core.testing.latent_attention import latent_batch
from pegainfer_core.testing.paged_attention import paged_batch

CAPABILITIES = (80, 90)
SHAPES = [
    # dtype, head dim, rows of (new tokens, context): long rows are split, 200 new tokens take the largest tile
    (torch.bfloat16, 128, [(1, 40), (1, 9000), (200, 300)]),
    (torch.bfloat16, 256, [(1, 40), (200, 300)]),
    (torch.float16, 80, [(1, 40), (12, 40)]),
    (torch.float32, 128, [(1, 40), (200, 300)]),
]
"""Of attention."""

MATRIX_TILE = LinearTile(features=16, depth=32, warps=1, stages=3, matrix_units=True, weight_first=True)

KERNELS = {
    attention_triton: ("attend_kernel", "decode_kernel", "write_kernel"),
    gdn_triton: ("step_kernel", "convolve_kernel", "prepare_kernel", "scan_kernel", "gated_norm_kernel"),
    latent_triton: ("attend_latent_kernel",),
    linear_triton: ("rows_kernel", "tiles_kernel"),
    moe_triton: ("gate_up_kernel", "down_kernel"),
    token_triton: (
        "norm_kernel",
        "silu_mul_kernel",
        "sigmoid_mul_kernel",
        "heads_kernel",
        "arg_max_parts_kernel",
        "arg_max_kernel",
        "draw_parts_kernel",
        "draw_kernel",
    ),
}


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
    """Compile every launch for every capability."""
    kernels = {(module, name): getattr(module, name) for module, names in KERNELS.items() for name in names}
    for capability in CAPABILITIES:
        driver.set_active(_OfflineDriver(capability))
        for facts, launch in itertools.chain(
            *(_attention_launches(), _latent_launches(), _delta_launches(), _expert_launches(), _operation_launches())
        ):
            report = functools.partial(_report, {"capability": capability} | facts)
            for (module, name), kernel in kernels.items():
                setattr(module, name, _CompileOnly(kernel, report))
            launch()


def _attention_launches() -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    for dtype, head_dim, rows in SHAPES:
        batch = paged_batch(rows, heads=(8, 2), head_dim=head_dim, page_size=16, dtype=dtype)
        backend = attention_triton.TritonAttention(torch.device("cpu"))
        yield {"dtype": str(dtype), "head_dim": head_dim}, functools.partial(batch.run, backend)


def _latent_launches() -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Latent pages at the widths of published models, decode rows and prompts."""
    backend = attention_triton.TritonAttention(torch.device("cpu"))
    for dtype, rows in ((torch.bfloat16, [(1, 40), (1, 9000), (200, 300)]), (torch.float32, [(1, 40), (200, 300)])):
        batch = latent_batch(
            rows, heads=16, rank=512, key_dim=128, rope_dim=64, value_dim=128, page_size=16, dtype=dtype
        )
        yield {"dtype": str(dtype), "rows": rows}, functools.partial(batch.run, backend)


def _expert_launches() -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Experts at real widths: every tile."""
    for dtype, tokens in ((torch.bfloat16, 1), (torch.bfloat16, 40), (torch.bfloat16, 200), (torch.float32, 1)):
        gate_up, down = torch.empty(8, 2816, 2048, dtype=dtype), torch.empty(8, 2048, 1408, dtype=dtype)
        ids_TK = torch.arange(tokens * 6).view(tokens, 6) % 8
        x_TE = torch.empty(tokens, 2048, dtype=dtype)
        mix = functools.partial(moe_triton.mix_experts, x_TE, gate_up, down, ids_TK, torch.ones(tokens, 6))
        yield {"dtype": str(dtype), "tokens": tokens}, mix


def _delta_launches() -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Gated DeltaNet at the widths of published models, for one value head to a key head and for several."""
    for dtype, heads in ((torch.bfloat16, 32), (torch.float32, 16)):
        case = layer_case([(1, 3), (100, 0)], heads=heads, key_heads=16, key_dim=128, value_dim=128).to(dtype, "cpu")
        launch = functools.partial(gdn_triton.gated_delta_net, case.projected_TP, case.weights, case.states, 0)
        yield {"dtype": str(dtype), "heads": heads}, functools.partial(launch, case.positions_T)


def _tile(dtype: torch.dtype) -> LinearTile:
    tile = choose_tile(1, 5120, 2560, dtype, gated=False)
    assert tile is not None
    return tile


def _operation_launches() -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Every kind of product, for one token and for several, and the operations on single tokens, at real widths."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        facts = {"dtype": str(dtype)}
        for tokens, tile in ((1, _tile(dtype)), (16, MATRIX_TILE)):
            x, weight = torch.empty(tokens, 2560, dtype=dtype), torch.empty(5120, 2560, dtype=dtype)
            plain = functools.partial(linear_triton.linear, x, weight, tile)
            yield facts, plain
            yield facts, functools.partial(plain, norm_I=x[0], eps=1e-6)
            yield facts, functools.partial(plain, norm_I=x[0], eps=1e-6, gated=True)
            yield facts, functools.partial(plain, residual_TO=torch.empty(tokens, 5120, dtype=dtype))
        yield facts, functools.partial(token_triton.rms_norm, x, x[0], 1e-6)
        yield facts, functools.partial(token_triton.add_rms_norm, x, x, x[0], 1e-6)
        yield facts, functools.partial(token_triton.silu_mul, x)
        yield facts, functools.partial(token_triton.sigmoid_mul, x, x)
        yield facts, functools.partial(token_triton.greedy, x, 2500)
        if dtype == torch.float32:
            yield facts, functools.partial(token_triton.sample, x, torch.zeros(len(x), dtype=torch.int64))
        batch = paged_batch([(1, 40)], heads=(8, 2), head_dim=128, page_size=16, dtype=dtype)
        positions_T, table = torch.zeros(1, dtype=torch.int64), torch.empty(64, 64)
        heads = functools.partial(token_triton.rotate_and_store, x[:1, :1536].view(1, 12, 128))
        pages = (batch.caches, batch.metadata.write_index_T)
        backend = attention_triton.TritonAttention(torch.device("cpu"))
        for norms in (None, (x[0], x[0], 1e-6)):
            yield facts, functools.partial(heads, norms, (table, table), positions_T, *pages)
            stacked = StackedHeads(
                qkv_TND=x[:1, :1536].view(1, 12, 128),
                norms=norms,
                tables=(table, table),
                positions_T=positions_T,
            )
            yield facts, functools.partial(backend.attend_heads, stacked, *batch.caches, batch.metadata, 0.1)


def _report(facts: dict[str, Any], compiled: Any) -> None:
    needs = {"kernel": compiled.metadata.name, "shared": compiled.metadata.shared, "image": len(compiled.asm["cubin"])}
    sys.stdout.write(json.dumps(facts | needs) + "\n")


if __name__ == "__main__":
    main()
