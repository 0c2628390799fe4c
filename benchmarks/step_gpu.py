"""Times of whole steps of the model on the GPU at hand, Qwen3-4B's shape with random weights, and what each kernel takes in them.

Owns measurement only. A step goes from token ids to chosen ids and is a replay of one captured graph, without the engine around it.
Attention is launched for contexts up to 8192 tokens, as the engine's graphs are. Writes one JSON file.

    python benchmarks/step_gpu.py --out step.json
    TRITON_INTERPRET=1 python benchmarks/step_gpu.py --out step.json --rehearse     a tiny model on the CPU
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention_gpu import microseconds
from gpu_spine import QWEN3_4B, provenance
from pegainfer_core.config import EngineConfig
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops import linear
from pegainfer_core.ops.attention import Attention
from pegainfer_core.ops.attention_triton import TritonAttention
from pegainfer_core.ops.dispatch import fast_ops
from pegainfer_core.ops.sampling import greedy
from pegainfer_core.ops.states import States
from pegainfer_core.testing.paged_attention import paged_batch
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config
from torch import Tensor

CAPTURED_CONTEXT = 8192
DECODE = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = {
    "1 x 1024": [(1024, 1024)],
    "2 x 1024": [(1024, 1024)] * 2,
    "8 rows, 1 x 376": [(1, 1024)] * 8 + [(376, 888)],
    "128 rows, 1 x 1024": [(1, 1024)] * 128 + [(1024, 1024)],
    "1 x 4096": [(4096, 4096)],
}
TRACED_EVENTS = 30


class Step:
    """The model and one batch of rows (new tokens, context)."""

    def __init__(self, model: Model, layers: int, heads: tuple[int, int], head_dim: int, vocab_size: int) -> None:
        self.model, self.layers, self.vocab_size = model, layers, vocab_size
        self.shapes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "page_size": 16}

    def take(self, rows: list[tuple[int, int]], device: str, dtype: torch.dtype) -> None:
        """Use this batch."""
        paged = paged_batch(rows, dtype=dtype, device=device, **self.shapes)
        table = paged.metadata.page_table_RP
        columns = -(-CAPTURED_CONTEXT // 16)
        if columns > table.shape[1]:
            table = torch.nn.functional.pad(table, (0, columns - table.shape[1]))
        metadata = dataclasses.replace(paged.metadata, page_table_RP=table, max_context_len=CAPTURED_CONTEXT)
        caches = [tuple(torch.nan_to_num(cache) for cache in paged.caches) for _ in range(self.layers)]
        attention = Attention(
            backend=TritonAttention(torch.device(device)),
            caches=caches,  # type: ignore[arg-type]
            metadata=metadata,
        )
        positions = [torch.arange(context - new, context) for new, context in rows]
        self.last = metadata.query_start_R1[1:].long() - 1
        self.batch = ForwardBatch(
            token_ids_T=torch.arange(len(paged.q_THD), device=device) % self.vocab_size,
            positions_T=torch.cat(positions).to(device),
            attention=attention,
            states=States(
                layers=[()] * self.layers,
                slots_R=metadata.query_start_R1[1:].long(),
                fresh_R=metadata.query_start_R1[1:],
                query_start_R1=metadata.query_start_R1,
                query_lens=metadata.query_lens,
                num_decode_rows=metadata.num_decode_rows,
            ),
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Chosen ids of every row."""
        return greedy(self.model.logits(self.model(self.batch)[self.last]), self.vocab_size)


def build(device: str, dtype: torch.dtype) -> Step:
    """The model with random weights."""
    config = tiny_config(**QWEN3_4B) if device == "cuda" else tiny_config()
    family = Qwen3Family()
    plan = family.plan(config, EngineConfig(model="random"), family.options())
    model = family.build(plan, BuildContext(device=torch.device(device), dtype=dtype, max_model_len=CAPTURED_CONTEXT))
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None:
            random = torch.randn(weight.shape, dtype=dtype, device=device)
            value = random * weight.shape[1] ** -0.5 if weight.dim() == 2 else torch.ones_like(random)
            module.weight = torch.nn.Parameter(value, requires_grad=False)
    group = plan.kv_groups[0]
    heads = (config["num_attention_heads"], group.num_kv_heads)
    return Step(model, plan.num_layers, heads, group.head_dim, plan.vocab_size)


def variants(decode: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The step as it is, and with one thing changed."""
    yield "us", contextlib.nullcontext
    yield "apart_us", functools.partial(mock.patch.object, TritonAttention, "takes_heads", False)
    if decode:
        yield "cublas_us", functools.partial(mock.patch.object, linear, "choose_tile", return_value=None)
    else:
        yield "one_stream_us", functools.partial(mock.patch.object, TritonAttention, "side_by_side", False)
        yield "plain_us", functools.partial(fast_ops, False)


def traced(work: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one replay: sums by name, and a stretch from the middle as (name, start, duration)."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    sums: dict[str, list[float]] = {}
    for _, name, took in events:
        total = sums.setdefault(name[:90], [0, 0.0])
        total[0], total[1] = total[0] + 1, round(total[1] + took, 1)
    middle = events[len(events) // 2 :][:TRACED_EVENTS]
    first = middle[0][0] if middle else 0.0
    by_time = dict(sorted(sums.items(), key=lambda item: -item[1][1])[:16])
    stretch = [[name[:40], round(start - first, 2), round(took, 2)] for start, name, took in middle]
    return {"launches": len(events), "by_name": by_time, "stretch": stretch}


def step_times(device: str, trace: bool) -> Iterator[dict[str, Any]]:
    """Decode rows of 1024 tokens, and prompts."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    step = build(device, dtype)
    cases = {f"{rows} rows": [(1, 1024)] * rows for rows in DECODE} | PROMPTS
    for name, rows in cases.items() if device == "cuda" else [("2 rows", [(1, 20)] * 2), ("prompt", [(1, 20), (9, 9)])]:
        step.take(rows, device, dtype)
        row: dict[str, Any] = {"step": name}
        for variant, changed in variants(decode=len(step.batch.token_ids_T) == len(rows)):
            with changed():
                took = microseconds(step.run, 1, 9) if device == "cuda" else float(step.run()[1].sum())
            row[variant] = round(took, 1)
        print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if device == "cuda" and trace:
            row["traced"] = traced(step.run)
        yield row
        torch.cuda.empty_cache()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    result: dict[str, Any] = {} if options.rehearse else {"provenance": provenance()}
    with torch.inference_mode():
        result["steps"] = []
        for row in step_times(device, trace=True):
            result["steps"].append(row)
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
            for name, (count, took) in row.get("traced", {}).get("by_name", {}).items():
                print(f"      {took:9.1f} us  {count:4.0f} x  {name}", flush=True)


if __name__ == "__main__":
    main()
