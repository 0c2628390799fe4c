"""How fast weights reach the GPU at hand, by threads and chunk size, beside safetensors' own way and the parts of the work.

Owns measurement only. The checkpoint is in the page cache when it is timed. Writes one JSON file.

    python benchmarks/loading_gpu.py --checkpoint DIR --out loading.json     DIR is made (Qwen3-4B's shape, random) if it is not there
    python benchmarks/loading_gpu.py --checkpoint DIR --out loading.json --rehearse     a small shape on the CPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_spine import provenance
from pegainfer_core.checkpoint import read_json, weight_files
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelPlan
from pegainfer_core.stored_tensors import StoredTensor, read_into, stored_tensors
from pegainfer_core.weight_transfer import CHUNK_BYTES, NUM_THREADS, CudaCopy, DeviceCopy, HostCopy, Move, transfer
from pegainfer_qwen3.family import Qwen3Family
from random_checkpoint import write_checkpoint
from safetensors import safe_open
from torch import Tensor

MIB = 1 << 20
THREADS = (1, 2, 4, 8, 12)
CHUNK_MIB = (2, 4, 8, 16, 32)
REPEATS = 2


def seconds(work: Callable[[], object]) -> float:
    """The best of some runs."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return round(best, 4)


def resident_mib() -> dict[str, int]:
    """Resident memory of this process, by kind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) // 1024 for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")}


def moves_of(plan: ModelPlan, stored: dict[str, StoredTensor], device: torch.device, dtype: torch.dtype) -> list[Move]:
    """Every parameter's memory, and what fills it."""
    moves: list[Move] = []
    for rule in plan.weight_rules:
        sources = [stored[source.name] for source in rule.sources if source.name in stored]
        if sources:
            rows = [source.shape[0] for source in sources]
            value = torch.empty((sum(rows), *sources[0].shape[1:]), dtype=dtype, device=device)
            moves += [Move(*pair) for pair in zip(sources, value.split(rows), strict=True)]  # type: ignore[no-untyped-call]
    return moves


def plain(moves: list[Move], device: torch.device) -> None:
    """What a loader does that reads tensor after tensor with safetensors."""
    for file, group in itertools.groupby(moves, key=lambda move: move.source.file):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for move in group:
                move.destination.copy_(opened.get_tensor(move.source.name))


def read_only(files: list[Path], threads: int) -> None:
    """Page cache to memory, without a device."""

    def read(part: tuple[Path, int]) -> None:
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        with part[0].open("rb", buffering=0) as opened:
            read_into(opened, part[1], buffer[: min(CHUNK_BYTES, part[0].stat().st_size - part[1])])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, _parts(files)))


def _parts(files: list[Path]) -> Iterator[tuple[Path, int]]:
    for file in files:
        for offset in range(0, file.stat().st_size, CHUNK_BYTES):
            yield file, offset


def lock_and_free(open_copy: Callable[[], DeviceCopy]) -> None:
    """The staging buffers of one thread: page-locked, and given back."""
    copy = open_copy()
    copy.buffers(2, CHUNK_BYTES)
    copy.close()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", 0)
    results: dict[str, Any] = {"resident_mib": {"imported": resident_mib()}}
    if not arguments.rehearse:
        results["provenance"] = provenance() | {"command": ["benchmarks/loading_gpu.py"]}
    if not (arguments.checkpoint / "config.json").exists():
        changes = {"num_hidden_layers": 2, "vocab_size": 4096} if arguments.rehearse else {}
        write_checkpoint(arguments.checkpoint, "qwen3-60m" if arguments.rehearse else "qwen3-4b", **changes)
    files = sorted(set(weight_files(arguments.checkpoint).values()))
    results["bytes"] = sum(file.stat().st_size for file in files)
    torch.empty(1, device=device)
    results["resident_mib"]["context"] = resident_mib()

    family = Qwen3Family()
    plan = family.plan(read_json(arguments.checkpoint / "config.json"), EngineConfig(model="x"), family.options())
    stored = stored_tensors(arguments.checkpoint)
    moves = moves_of(plan, stored, device, torch.bfloat16)
    open_copy: Callable[[], DeviceCopy] = HostCopy if arguments.rehearse else lambda: CudaCopy(device)

    def load(threads: int, chunk_bytes: int) -> None:
        transfer(moves, device, _ignore, open_copy=open_copy, num_threads=threads, chunk_bytes=chunk_bytes)

    load(NUM_THREADS, CHUNK_BYTES)
    results["resident_mib"]["loaded"] = resident_mib()
    results["seconds"] = {
        "plain": seconds(lambda: plain(moves, device)),
        "default": seconds(lambda: load(NUM_THREADS, CHUNK_BYTES)),
        "read only": {str(threads): seconds(lambda n=threads: read_only(files, n)) for threads in THREADS},  # type: ignore[misc]
        "lock and free one thread's buffers": seconds(lambda: lock_and_free(open_copy)),
        "by threads, then MiB a chunk": {
            str(threads): {str(size): seconds(lambda n=threads, s=size: load(n, s * MIB)) for size in CHUNK_MIB}  # type: ignore[misc]
            for threads in THREADS
        },
    }
    results["resident_mib"]["end"] = resident_mib()
    check: Tensor = moves[-1].destination
    results["finite"] = bool(check.isfinite().all())
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


def _ignore(num_bytes: int) -> None:
    del num_bytes


if __name__ == "__main__":
    main()
