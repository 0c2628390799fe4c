"""Times of the Triton attention kernels on the GPU at hand: decode, prompts, page writes; on demand other tiles and splits.

Owns measurement only. Inputs are random and rotate over more data than the L2 cache holds; a number is the median of replays of a
captured graph, so launch gaps are not in it. gpu_spine.py runs it and writes the results.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pegainfer_core.ops.attention import AttentionBackend, AttentionMetadata
from pegainfer_core.ops.attention_torch import TorchAttention
from pegainfer_core.ops.attention_triton import SplitRule, Tile, TritonAttention
from torch import Tensor
from triton.runtime.errors import OutOfResources

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16  # Qwen3-4B
CUDA = torch.device("cuda")
DECODE = [(1, 1024), (1, 4096), (1, 16384), (8, 1024), (32, 1024), (32, 4096), (64, 1024), (64, 4096)]
PROMPTS = [("4x2048", [(2048, 2048)] * 4), ("1x8192", [(8192, 8192)]), ("16 new of 4096", [(16, 4096)])]

DECODE_TILES = [
    Tile(queries=16, keys=keys, warps=warps, stages=stages)
    for keys, warps, stages in [
        (64, 4, 3),
        (64, 4, 2),
        (64, 4, 4),
        (32, 4, 4),
        (32, 2, 4),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 3),
    ]
]
PROMPT_TILES = [
    Tile(queries=queries, keys=keys, warps=warps, stages=stages)
    for queries, keys, warps, stages in [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 32, 8, 3),
        (128, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 32, 4, 3),
        (256, 64, 8, 2),
    ]
]


class FixedTile(TritonAttention):
    """The backend with one tile for everything."""

    def __init__(self, device: torch.device, tile: Tile, rule: SplitRule | None = None) -> None:
        super().__init__(device, rule)
        self._tile = tile

    def tile(self, dtype: torch.dtype, head_dim: int, rows: int, work: int) -> Tile:
        """The same for all."""
        return self._tile


class Case:
    """Rotating inputs of one shape. `rows` are (new tokens, context length with them)."""

    def __init__(self, rows: list[tuple[int, int]], *, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rows = rows
        pages_R = [-(-context // PAGE_SIZE) for _, context in rows]
        kv_bytes = 2 * sum(pages_R) * PAGE_SIZE * KV_HEADS * HEAD_DIM * dtype.itemsize
        self.kv_bytes = 2 * sum(context for _, context in rows) * KV_HEADS * HEAD_DIM * dtype.itemsize
        self.num_sets = max(2, min(64, (512 << 20) // kv_bytes))
        tokens = sum(new for new, _ in rows)
        self.metadata = [self._metadata(pages_R) for _ in range(self.num_sets)]
        shape = (sum(pages_R) + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = [(_random(shape, dtype), _random(shape, dtype)) for _ in range(self.num_sets)]
        self.queries = [_random((tokens, HEADS, HEAD_DIM), dtype) for _ in range(self.num_sets)]
        self.new = _random((tokens, KV_HEADS, HEAD_DIM), dtype)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, of the visible pairs of query and key only."""
        pairs = sum(new * context - new * (new - 1) // 2 for new, context in self.rows)
        return 4 * pairs * HEADS * HEAD_DIM

    def attend(self, backend: AttentionBackend) -> None:
        """One call for each set of inputs."""
        for q_THD, (k_PSKD, v_PSKD), metadata in zip(self.queries, self.caches, self.metadata, strict=True):
            backend.run(q_THD, k_PSKD, v_PSKD, metadata, HEAD_DIM**-0.5)

    def write(self, backend: AttentionBackend) -> None:
        """One call for each set of inputs."""
        for (k_PSKD, v_PSKD), metadata in zip(self.caches, self.metadata, strict=True):
            backend.write(self.new, self.new, k_PSKD, v_PSKD, metadata.write_index_T)

    def _metadata(self, pages_R: list[int]) -> AttentionMetadata:
        order = torch.randperm(sum(pages_R), dtype=torch.int32, device=CUDA) + 1
        table_RP = torch.zeros(len(pages_R), max(pages_R), dtype=torch.int32, device=CUDA)
        for row, (end, pages) in enumerate(zip(itertools.accumulate(pages_R), pages_R, strict=True)):
            table_RP[row, :pages] = order[end - pages : end]
        query_lens, context_lens = [new for new, _ in self.rows], [context for _, context in self.rows]
        write_index = []
        for row, (new, context) in enumerate(self.rows):
            position = torch.arange(context - new, context, device=CUDA)
            write_index.append(table_RP[row, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE)
        return AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start_R1=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=CUDA),
            context_lens_R=torch.tensor(context_lens, dtype=torch.int32, device=CUDA),
            page_table_RP=table_RP,
            write_index_T=torch.cat(write_index),
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
            num_decode_rows=sum(new == 1 for new in query_lens),
        )


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=CUDA)


def microseconds(work: Callable[[], object], calls: int, repeats: int = 15) -> float:
    """Median time of one of the `calls` in `work`, as replays of a captured graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_microseconds(work: Callable[[], object], calls: int) -> float:
    """Median time of the host for one of the `calls`, which must not wait for the device."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """What this card reaches: a large copy (bytes read and written) and a large bfloat16 product."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=CUDA).random_()
    target = torch.empty_like(source)
    copy = microseconds(functools.partial(target.copy_, source), 1)
    del source, target
    a, b = _random((8192, 8192), torch.bfloat16), _random((8192, 8192), torch.bfloat16)
    out = torch.empty_like(a)
    product = microseconds(functools.partial(torch.mm, a, b, out=out), 1)
    return {"copy_tb_s": round(2 * (4 << 30) / copy / 1e6, 2), "bf16_tflop_s": round(2 * 8192**3 / product / 1e6)}


def decode_times() -> Iterator[dict[str, Any]]:
    """Decode rows of equal length: time, the bandwidth of reading keys and values, and what the host spends."""
    for rows, context in DECODE:
        case, backend = Case([(1, context)] * rows), TritonAttention(CUDA)
        took = microseconds(functools.partial(case.attend, backend), case.num_sets)
        host = host_microseconds(functools.partial(case.attend, backend), case.num_sets)
        speed = {"us": round(took, 1), "tb_s": round(case.kv_bytes / took / 1e6, 2), "host_us": round(host, 1)}
        yield {"rows": rows, "context": context} | speed


def prompt_times() -> Iterator[dict[str, Any]]:
    """Prompts and a short chunk on a long context."""
    for name, rows in PROMPTS:
        case, backend = Case(rows), TritonAttention(CUDA)
        took = microseconds(functools.partial(case.attend, backend), case.num_sets)
        yield {"rows": name, "us": round(took, 1), "tflop_s": round(case.flops / took / 1e6, 1)}


def write_times() -> Iterator[dict[str, Any]]:
    """Writing one layer's keys and values, by each backend."""
    for tokens, backend in itertools.product((64, 8192), (TritonAttention(CUDA), TorchAttention())):
        case = Case([(1, 16)] * 64 if tokens == 64 else [(tokens, tokens)])
        took = microseconds(functools.partial(case.write, backend), case.num_sets)
        yield {"tokens": tokens, "backend": backend.name, "us": round(took, 1)}


def _microseconds_or_none(case: Case, backend: AttentionBackend) -> float | None:
    """None where this card's registers or shared memory do not hold the tile."""
    try:
        return round(microseconds(functools.partial(case.attend, backend), case.num_sets, 5), 1)
    except OutOfResources:
        return None


def sweep_times() -> Iterator[dict[str, Any]]:
    """Other tiles and splits: where the defaults stand."""
    for rows, context in DECODE:
        case = Case([(1, context)] * rows)
        for tile, parts in itertools.product(DECODE_TILES, (1, 2, 4, 8, 16, 32, 64, 128)):
            if context // parts >= 64 and rows * parts <= 512:
                rule = SplitRule(programs=1 << 30, shortest=16, longest=1 << 30, most=parts)
                backend = FixedTile(CUDA, tile, rule)
                took = _microseconds_or_none(case, backend)
                yield {"rows": rows, "context": context, "parts": parts, "tile": _short(tile), "us": took}
    for name, rows_of in PROMPTS:
        case = Case(rows_of)
        for tile in PROMPT_TILES:
            yield {"rows": name, "tile": _short(tile), "us": _microseconds_or_none(case, FixedTile(CUDA, tile))}


def _short(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys}/{tile.warps}w{tile.stages}s"


def _collect(title: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    print(title)
    collected = []
    for row in rows:
        print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        collected.append(row)
    return collected


def measure() -> dict[str, Any]:
    """The defaults, printed as they come."""
    result: dict[str, Any] = {"ceilings": ceilings()}
    print(f"ceilings\n  {result['ceilings']}", flush=True)
    result["decode"] = _collect("decode", decode_times())
    result["prompts"] = _collect("prompts", prompt_times())
    result["write"] = _collect("write", write_times())
    return result


def sweep() -> list[dict[str, Any]]:
    """Other tiles and splits, printed as they come."""
    return _collect("sweep", sweep_times())
