"""Times of linear layers of 8 to 128 tokens with what stands before and after them, on the GPU at hand: cuBLAS against our tiles.

Owns measurement only; weights and shapes are linear_gpu.py's. A chain is what a layer of the model launches for one weight: the norm
before, and after it the activation, or the residual's sum and the next norm. `+N` in a cuBLAS chain: kernels before it ask for N lines of
each row.

    python benchmarks/linear_chains_gpu.py --out chains.json --seconds 100
    TRITON_INTERPRET=1 python benchmarks/linear_chains_gpu.py --out chains.json --rehearse     values only, on the CPU
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_spine import provenance
from linear_gpu import EPS, PRODUCTS, SMALL, WORST_ERROR, Case, Product
from pegainfer_core.ops import linear_triton, token_triton
from pegainfer_core.ops.linear_tiles import LinearTile
from torch import Tensor

TOKENS = (8, 16, 32, 64, 128)
SHARED_BYTES = 220 << 10
FEWEST, MOST = 90, 640
"""Programs of a launch."""


class Chain(Case):
    """One weight with its neighbours."""

    def before(self, weight: Tensor, ask: bool) -> Tensor:
        """The input of the product."""
        if not self.product.norm:
            return self.x
        return token_triton.rms_norm(self.x, self.norm.weight, EPS, weight if ask else None)

    def cublas(self, weight: Tensor, lines: int = 0) -> Tensor:
        """As the model does it now; the last tensor of the chain."""
        with mock.patch.object(token_triton, "NEXT_LINES", lines):
            if self.product.residual:
                total = self.stream.addmm_(self.x, weight.T)
                return token_triton.rms_norm(total, self.after.weight, EPS, weight if lines else None)
            out = F.linear(self.before(weight, lines > 0), weight)
            return token_triton.silu_mul(out) if self.product.gated else out

    def ours(self, weight: Tensor, tile: LinearTile) -> Tensor:
        """With our product. Parts of a product without a residual are left to the next kernel."""
        parts = linear_triton.linear_parts(self.before(weight, ask=False), weight, tile)
        if self.product.residual:
            return token_triton.add_parts_rms_norm(parts, self.residual, self.after.weight, EPS)[0]
        return token_triton.silu_mul(parts[0]) if self.product.gated else parts

    def take(self, tokens: int) -> Chain:
        """Use other inputs."""
        super().take(tokens)
        self.stream = self.residual.clone()
        rows, device = self.product.features, self.weights.device
        self.after = type(self.norm)(rows, EPS, self.weights.dtype)
        ones = torch.ones(rows, dtype=self.weights.dtype, device=device)
        self.after.weight = torch.nn.Parameter(ones, requires_grad=False)
        return self

    def difference(self, tile: LinearTile) -> float:
        """Of ours and cuBLAS's, relative."""
        self.stream.copy_(self.residual)
        found, expected = self.ours(self.weights[0], tile).float(), self.cublas(self.weights[0]).float()
        found = found.sum(0) if found.dim() == 3 else found
        return float((found - expected).norm() / expected.norm())


def tiles(product: Product, tokens: int) -> Iterator[LinearTile]:
    """Candidates whose programs are about as many as the device holds at once."""
    rows, depth = product.weight_shape
    geometry = [
        *((True, 64, 4, block, stages) for block, stages in ((64, 4), (64, 7), (128, 3), (128, 4), (256, 2), (256, 3))),
        *((True, 128, 4, block, stages) for block, stages in ((64, 3), (64, 5), (128, 3))),
        *((True, 128, 8, block, stages) for block, stages in ((64, 4), (128, 3))),
        *((False, 32, 4, block, stages) for block, stages in ((128, 3), (128, 5), (256, 3))),
        *((False, 64, 4, block, stages) for block, stages in ((64, 5), (128, 3))),
    ]
    for weight_first, features, warps, block, stages in geometry:
        size = (features + max(16, tokens)) * block * 2 * stages
        if size > SHARED_BYTES or (not weight_first and tokens > 64):
            continue
        tile = LinearTile(
            features=features,
            depth=block,
            warps=warps,
            stages=stages,
            matrix_units=True,
            weight_first=weight_first,
            prefetch=8 if block > 64 else 4,
        )
        blocks = -(-rows // features)
        for parts in (1,) if product.gated or product.name == "lm_head" else (1, 2, 3, 4, 6, 8):
            if (FEWEST <= blocks * parts <= MOST or rows > 1 << 16 or product.gated) and depth // parts >= 2 * block:
                yield dataclasses.replace(tile, parts=parts)


def name(tile: LinearTile) -> str:
    """Short."""
    kind = "W" if tile.weight_first else "M"
    return f"{kind}{tile.features}x{tile.depth}/{tile.warps}w{tile.stages}s{tile.prefetch}p x{tile.parts}"


def _value(chain: Chain, tile: LinearTile) -> float | None:
    """None where this card's registers or shared memory do not hold the tile."""
    try:
        return chain.difference(tile)
    except Exception as error:  # whatever Triton makes of a tile that it cannot build
        print(f"  {name(tile)}: {type(error).__name__}", flush=True)
        return None


def compile_ahead(part: int, parts: int) -> int:
    """Launch every part-th candidate once, so that it is in Triton's cache. Runs in a process of its own."""
    todo = dict.fromkeys(
        (tokens, dataclasses.replace(tile, parts=min(tile.parts, 2)))  # their number is no constant of the kernel
        for tokens in TOKENS
        for product in PRODUCTS
        for tile in tiles(product, tokens)
    )
    mine = list(todo)[part::parts]
    with torch.inference_mode():
        chain = Chain(PRODUCTS[0], 8, "cuda", sets=1)
        for tokens, tile in mine:
            _value(chain.take(tokens), tile)
    return len(mine)


def times(device: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Every chain and number of tokens."""
    for product in PRODUCTS if device == "cuda" else SMALL:
        chain = Chain(product, 8, device)
        for tokens in TOKENS if device == "cuda" else (8,):
            chain.take(tokens)
            where: dict[str, Any] = {"product": product.name, "tokens": tokens}
            for lines in (0,) if product.name == "lm_head" or device == "cpu" else (0, 4, 8, 16):
                took = chain.microseconds(functools.partial(chain.cublas, lines=lines))
                yield where | {"by": f"cublas+{lines}"} | chain.speed(took)
            for tile in tiles(product, tokens) if device == "cuda" else REHEARSED:
                if time.monotonic() > deadline:
                    return
                error = _value(chain, tile)
                if error is None:
                    continue
                row = where | {"by": name(tile), "error": round(error, 6)}
                if not error < WORST_ERROR:
                    yield row | {"wrong": True}
                    continue
                took = chain.microseconds(functools.partial(chain.ours, tile=tile), 5)
                yield row | chain.speed(took)
        del chain


REHEARSED = [LinearTile(features=16, depth=16, warps=1, stages=2, matrix_units=True, weight_first=True)]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="at most, compilation included")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    result: dict[str, Any] = {} if options.rehearse else {"provenance": provenance()}
    deadline = time.monotonic() + options.seconds
    if device == "cuda":
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
            counts = list(pool.map(compile_ahead, range(options.workers), [options.workers] * options.workers))
        print(f"compiled {sum(counts)} tiles; {deadline - time.monotonic():.0f} s left", flush=True)
    with torch.inference_mode():
        rows = result["chains"] = list(times(device, deadline))
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    for key in dict.fromkeys((row["product"], row["tokens"]) for row in rows):
        same = sorted(
            (row for row in rows if (row["product"], row["tokens"]) == key and "us" in row), key=lambda row: row["us"]
        )
        cublas = "  ".join(f"{row['by']} {row['us']}" for row in same if row["by"].startswith("cublas"))
        fastest = "  ".join(f"{row['by']} {row['us']}" for row in same if not row["by"].startswith("cublas"))
        print(f"  {key[0]} {key[1]}: {cublas} | {'  '.join(fastest.split('  ')[:6])}")
    print(f"wrong: {[row for row in rows if 'wrong' in row][:10]}")


if __name__ == "__main__":
    main()
