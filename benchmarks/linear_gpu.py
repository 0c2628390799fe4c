"""Values and times of the fused operations on the GPU at hand, for Qwen3-4B's shapes, and of the alternatives to each.

Owns measurement only. Weights rotate over more data than the L2 cache holds; a number is the median of replays of a captured graph.
Every tile is checked against the plain operations in float32 before it is timed. Writes one JSON file.

    python benchmarks/linear_gpu.py --out linear.json              the tiles in use, single operations
    python benchmarks/linear_gpu.py --out linear.json --sweep      and every other tile, compiled ahead by some processes
    TRITON_INTERPRET=1 python benchmarks/linear_gpu.py --out linear.json --rehearse     tiny shapes on the CPU: values only
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_gpu import microseconds
from gpu_spine import provenance
from pegainfer_core.ops import linear_triton
from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.dispatch import fast_ops
from pegainfer_core.ops.linear_tiles import LinearTile, choose_tile
from pegainfer_core.ops.norm import RMSNorm, rms_norm
from pegainfer_core.ops.sampling import greedy
from torch import Tensor

BF16 = torch.bfloat16
EPS = 1e-6
TOKENS = (1, 2, 4, 8, 16, 32, 64)
WORST_ERROR = 1e-2
ROTATED_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """One linear layer of the model."""

    name: str
    features: int
    depth: int
    norm: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Gate rows and up rows are both in it."""
        return self.features * (1 + self.gated), self.depth


PRODUCTS = [
    Product("qkv", 6144, 2560, norm=True),
    Product("o", 2560, 4096, residual=True),
    Product("gate_up", 9728, 2560, norm=True, gated=True),
    Product("down", 2560, 9728, residual=True),
    Product("lm_head", 151936, 2560),
]
SMALL = [
    dataclasses.replace(product, features=product.features // 128 + 3, depth=product.depth // 64)
    for product in PRODUCTS[:-1]
]


class Case:
    """Rotating weights of one product, and inputs for one number of tokens."""

    def __init__(self, product: Product, tokens: int, device: str, sets: int | None = None) -> None:
        self.product, self.tokens = product, tokens
        rows, depth = product.weight_shape
        enough = max(2, min(24, math.ceil(ROTATED_BYTES / (2 * rows * depth))))
        self.sets = sets or (1 if device == "cpu" else enough)
        dtype = torch.float16 if device == "cpu" else BF16
        self.weights = torch.randn(self.sets, rows, depth, dtype=dtype, device=device) * depth**-0.5
        self.norm = RMSNorm(depth, EPS, dtype)
        self.norm.weight = torch.nn.Parameter(torch.rand(depth, dtype=dtype, device=device) + 0.5, requires_grad=False)
        self.take(tokens)

    def take(self, tokens: int) -> Case:
        """Use other inputs."""
        self.expected: Tensor | None = None
        like = self.weights
        self.tokens = tokens
        self.x = torch.randn(tokens, self.product.depth, dtype=like.dtype, device=like.device)
        self.residual = torch.randn(tokens, self.product.features, dtype=like.dtype, device=like.device)
        return self

    def chosen(self) -> LinearTile | None:
        """The tile in use, or None where cuBLAS is."""
        product = self.product
        return choose_tile(self.tokens, product.features, product.depth, self.x.dtype, product.gated)

    def run(self, weight: Tensor, tile: LinearTile) -> Tensor:
        """By our kernels."""
        product = self.product
        return linear_triton.linear(
            self.x,
            weight,
            tile,
            norm_I=self.norm.weight if product.norm else None,
            eps=EPS,
            gated=product.gated,
            residual_TO=self.residual if product.residual else None,
        )

    def plain(self, weight: Tensor) -> Tensor:
        """By cuBLAS, with single kernels for what is before and after."""
        x = self.norm(self.x) if self.product.norm else self.x
        if self.product.residual:
            return self.residual.addmm_(x, weight.T)
        out = F.linear(x, weight)
        return silu_mul(out) if self.product.gated else out

    def error(self, tile: LinearTile) -> float:
        """Against the same in float32."""
        if self.expected is None:
            weight, x = self.weights[0].float(), self.x.float()
            with fast_ops(False):
                x = rms_norm(x, self.norm.weight.float(), EPS) if self.product.norm else x
                out = F.linear(x, weight)
                out = silu_mul(out) if self.product.gated else out
            self.expected = out + self.residual.float() if self.product.residual else out
        found = self.run(self.weights[0], tile).float()
        return float((found - self.expected).norm() / self.expected.norm())

    def microseconds(self, call: Callable[[Tensor], Tensor], repeats: int = 7) -> float:
        """Of one call."""
        if not self.weights.is_cuda:
            call(self.weights[0])
            return 1.0
        return microseconds(lambda: [call(weight) for weight in self.weights], self.sets, repeats)

    def speed(self, took: float) -> dict[str, float]:
        """As the bandwidth of reading the weight."""
        size = self.weights[0].numel() * self.weights.element_size()
        return {"us": round(took, 2), "tb_s": round(size / took / 1e6, 2)}


def tiles(tokens: int, gated: bool) -> Iterator[LinearTile]:
    """Candidates for so many tokens."""
    if tokens <= 4:
        yield from _row_tiles(tokens, gated)
    yield from _matrix_tiles(tokens, gated)


def _row_tiles(tokens: int, gated: bool) -> Iterator[LinearTile]:
    geometry = itertools.product((2, 4, 8, 16), ((256, 1), (512, 1), (512, 2), (1024, 4), (2048, 8)))
    for (features, (depth, warps)), stages in itertools.product(geometry, (1, 3)):
        sums = tokens * features * (1 + gated) * depth // (32 * warps)
        if 16 <= sums <= 128 and (tokens == 1 or stages == 1):
            yield LinearTile(features=features, depth=depth, warps=warps, stages=stages)


def _matrix_tiles(tokens: int, gated: bool) -> Iterator[LinearTile]:
    block = max(16, tokens)
    shapes = [
        *itertools.product((False,), (16,), (1, 2), (128, 256, 512), (3, 5)),
        *itertools.product((False,), (32,), (2, 4), (128, 256), (3, 5)),
        *itertools.product((False,), (64,), (4, 8), (64, 128), (3, 5)),
        *itertools.product((True,), (16,), (1,), (128, 256, 512), (3, 5)),
        *itertools.product((True,), (32,), (2,), (128, 256), (3, 5)),
        *itertools.product((True,), (64,), (4,), (64, 128, 256), (3, 5)),
        *itertools.product((True,), (128,), (4, 8), (64, 128), (3, 5)),
    ]
    for weight_first, features, warps, depth, stages in shapes:
        if (features * (1 + gated) + block) * depth * 2 * stages <= 200 << 10 and not (tokens < 8 and stages == 5):
            yield LinearTile(
                features=features,
                depth=depth,
                warps=warps,
                stages=stages,
                matrix_units=True,
                weight_first=weight_first,
            )


def compile_ahead(part: int, parts: int) -> int:
    """Launch every part-th candidate once, so that it is in Triton's cache. Runs in a process of its own."""
    todo = [
        (product, block, tile)
        for product in PRODUCTS
        for block in (1, 2, 4, 8, 16, 32, 64)
        for tile in tiles(block, product.gated)
    ]
    done = 0
    for product in PRODUCTS:
        mine = [(block, tile) for other, block, tile in todo[part::parts] if other == product]
        if not mine:
            continue
        case = Case(dataclasses.replace(product), 1, "cuda")
        for block, tile in mine:
            _error_or_none(case.take(block), tile)
            done += 1
        del case
        torch.cuda.empty_cache()
    return done


def _error_or_none(case: Case, tile: LinearTile) -> float | None:
    """None where this card's registers or shared memory do not hold the tile."""
    try:
        case.run(case.weights[0], tile)
    except Exception as error:  # whatever Triton makes of a tile that it cannot build
        print(f"  {_short(tile)}: {type(error).__name__}", flush=True)
        return None
    return 0.0


def _short(tile: LinearTile) -> str:
    kind = ("W" if tile.weight_first else "M") if tile.matrix_units else "R"
    return f"{kind}{tile.features}x{tile.depth}/{tile.warps}w{tile.stages}s"


def product_times(device: str, sweep: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Each product and number of tokens: cuBLAS, the tile in use, and (sweep) every candidate that gives right values."""
    for product in PRODUCTS if device == "cuda" else SMALL:
        case = Case(product, 1, device)
        for tokens in TOKENS:
            case.take(tokens)
            where = {"product": product.name, "tokens": tokens}
            yield where | {"by": "cublas"} | case.speed(case.microseconds(case.plain))
            if chosen := case.chosen():
                yield where | _measured(case, chosen) | {"chosen": True}
            for tile in tiles(tokens, product.gated) if sweep else ():
                if time.monotonic() > deadline:
                    return
                if _error_or_none(case, tile) is not None:
                    yield where | _measured(case, tile)


def _measured(case: Case, tile: LinearTile) -> dict[str, Any]:
    error = case.error(tile)
    row: dict[str, Any] = {"by": _short(tile), "error": round(error, 6)}
    if not error < WORST_ERROR:
        return row | {"wrong": True}
    return row | case.speed(case.microseconds(lambda weight: case.run(weight, tile), 5))


def single_times(device: str) -> Iterator[dict[str, Any]]:
    """Norm, activation, heads and arg max: fused and plain."""
    for tokens in (1, 16, 128, 2048) if device == "cuda" else (2,):
        for name, call, size in _single_calls(tokens, device):
            row: dict[str, Any] = {"operation": name, "tokens": tokens}
            for kind, enabled in (("us", True), ("plain_us", False)):
                with fast_ops(enabled):
                    row[kind] = round(_of_ten(call), 2) if device == "cuda" else float(call() is not None)
            yield row | {"gb_s": round(size / row["us"] / 1e3)}


def _of_ten(call: Callable[[], Any]) -> float:
    return microseconds(lambda: [call() for _ in range(10)], 10)


def _single_calls(tokens: int, device: str) -> Iterator[tuple[str, Callable[[], Any], int]]:
    dtype = BF16 if device == "cuda" else torch.float32
    hidden, inter, vocab = (2560, 9728, 151936) if device == "cuda" else (40, 72, 100)
    x = torch.randn(tokens, hidden, dtype=dtype, device=device)
    norm = RMSNorm(hidden, EPS, dtype)
    norm.weight = torch.nn.Parameter(torch.ones(hidden, dtype=dtype, device=device), requires_grad=False)
    yield "rms_norm", lambda: norm(x), 2 * x.nbytes
    yield "add_rms_norm", lambda: norm.add(x, x), 4 * x.nbytes
    gate_up = torch.randn(tokens, 2 * inter, dtype=dtype, device=device)
    yield "silu_mul", lambda: silu_mul(gate_up), gate_up.nbytes * 3 // 2
    if tokens <= 256:
        logits = torch.randn(tokens, vocab, dtype=dtype, device=device)
        yield "greedy", lambda: greedy(logits, vocab - 7), logits.nbytes


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The three fastest of each product and number of tokens."""
    timed = [row for row in rows if "us" in row]
    found = []
    for key in dict.fromkeys((row["product"], row["tokens"]) for row in timed):
        same = sorted(
            (row for row in timed if (row["product"], row["tokens"]) == key), key=lambda row: float(row["us"])
        )
        cublas = next((row["us"] for row in same if row["by"] == "cublas"), None)
        fastest = [f"{row['by']} {row['us']} ({row['tb_s']})" for row in same[:4]]
        found.append({"product": key[0], "tokens": key[1], "cublas": cublas, "best": "  ".join(fastest)})
    return found


def _collect(title: str, rows: Iterator[dict[str, Any]], quiet: bool = False) -> list[dict[str, Any]]:
    print(title)
    collected = []
    for row in rows:
        if not quiet:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        collected.append(row)
    return collected


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0, help="of the sweep")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead of the sweep")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    result: dict[str, Any] = {} if options.rehearse else {"provenance": provenance()}

    def write() -> None:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")

    with torch.inference_mode():
        result["single"] = _collect("single operations", single_times(device))
        write()
        deadline = time.monotonic() + options.seconds
        if options.sweep and not options.rehearse:
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
                counts = list(pool.map(compile_ahead, range(options.workers), [options.workers] * options.workers))
            print(f"compiled {sum(counts)} tiles; {deadline - time.monotonic():.0f} s left", flush=True)
        rows = product_times(device, options.sweep, deadline)
        result["products"] = _collect("products", rows, quiet=options.sweep)
    result["best"] = _collect("best", iter(best(result["products"])))
    wrong = [row for row in result["products"] if "wrong" in row]
    print(f"{len(wrong)} wrong: {wrong[:10]}")
    write()


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
