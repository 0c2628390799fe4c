"""Times of the gated DeltaNet kernels on the GPU at hand, at the widths of Qwen3.5-4B, and on demand of other tiles.

    python benchmarks/delta_gpu.py --out FILE [--sweep]

Owns measurement only. A number is the median of replays of a captured graph in which each of several layers has states of its own, so
launch gaps are not in it and the states come from memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pegainfer_core.ops import gdn_triton
from pegainfer_core.ops.gdn_triton import ChunkTile, chunk_tile
from pegainfer_core.testing.gated_delta_net import layer_case
from pegainfer_server.bench.provenance import provenance
from pegainfer_server.bench.report import document, finish
from triton.runtime.errors import OutOfResources

WIDTHS = {"heads": 32, "key_heads": 16, "key_dim": 128, "value_dim": 128}
LAYERS = 4
REPLAYS = 30
DECODE_ROWS = (1, 8, 16, 32, 64, 128)
PROMPTS = {
    "1x1024": [(1024, 0)],
    "8x128": [(128, 0)] * 8,
    "1x3200": [(3200, 0)],
    "32 decode + 1x1024": [(1, 500)] * 32 + [(1024, 0)],
}
BANDWIDTH_GB_S = 4800
"""Of an H200: what reading and writing the states alone would take is beside each decode time."""


def time_us(rows: list[tuple[int, int]], tile: ChunkTile | None = None) -> float:
    """One layer's time."""
    case = layer_case(rows, **WIDTHS).to(torch.bfloat16, "cuda")
    layers = [tuple(tensor.nan_to_num().clone() for tensor in case.states.layers[0]) for _ in range(LAYERS)]
    states = dataclasses.replace(case.states, layers=layers)
    run = functools.partial(gdn_triton.gated_delta_net, case.projected_TP, case.weights, states)

    def work() -> None:
        for layer in range(LAYERS):
            run(layer, case.positions_T, tile)

    return _replayed_us(work) / LAYERS


def _replayed_us(work: Callable[[], None]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def decode_points() -> list[dict[str, Any]]:
    """Rows of one token."""
    state_bytes = 2 * WIDTHS["heads"] * WIDTHS["key_dim"] * WIDTHS["value_dim"] * 4
    return [
        {
            "rows": rows,
            "us": round(time_us([(1, 500)] * rows), 2),
            "states_alone_us": round(rows * state_bytes / BANDWIDTH_GB_S / 1e3, 2),
        }
        for rows in DECODE_ROWS
    ]


def prompt_points(sweep: bool) -> list[dict[str, Any]]:
    """Prompts, with the tile in use, or with others beside it."""
    own = chunk_tile(torch.bfloat16, torch.device("cuda"))
    tiles = [own]
    if sweep:
        tiles += [
            dataclasses.replace(own, values=values, scan_stages=stages, warps=warps)
            for values in (16, 32, 64)
            for stages in (1, 2, 3)
            for warps in (4, 8)
        ]
        tiles.append(dataclasses.replace(own, chunk=32))
        tiles.append(dataclasses.replace(own, solve="tf32x3"))
    points: list[dict[str, Any]] = []
    for name, rows in PROMPTS.items():
        for tile in dict.fromkeys(tiles):
            try:
                points.append({"rows": name, "us": round(time_us(rows, tile), 1), **dataclasses.asdict(tile)})
            except OutOfResources as error:
                points.append({"rows": name, "us": None, "error": str(error), **dataclasses.asdict(tile)})
    return points


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="other tiles too")
    arguments = parser.parse_args()
    facts = provenance("delta_gpu", vars(arguments))
    decode, prompts = decode_points(), prompt_points(arguments.sweep)
    for point in [*decode, *prompts]:
        print(point, file=sys.stderr)
    finish(document("delta kernels", facts, decode=decode, prompts=prompts), arguments.out, [])


if __name__ == "__main__":
    main()
