"""pegainfer and transformers' `generate` on a CPU: the same checkpoint, type, prompts and threads, one after the other (goal P11).

    python benchmarks/cpu_peer.py MODEL [MODEL ...] --out FILE     MODEL: a checkpoint directory, or smollm2 or qwen3-60m

Owns the comparison. Each engine runs in a process of its own, which loads the model once and times several runs; the median counts.
Streams are requests that are there at the same time: pegainfer takes them together. `generate` can be called for each of them, one
after the other (serial), or by somebody who has all of them at hand in one batch (batch); both are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pegainfer_server.bench.provenance import provenance
from pegainfer_server.bench.report import document, finish, show
from pegainfer_server.bench.workload import Point, prompts

KNOWN = ("smollm2", "qwen3-60m")
TOKEN_IDS = range(1000, 32000)
STREAMS = (1, 8)
GOALS = {1: 1.5, 8: 4.0}
COLUMNS = (
    ("model", "model"),
    ("type", "dtype"),
    ("streams", "streams"),
    ("pegainfer tok/s", "pegainfer"),
    ("generate, serial", "serial"),
    ("generate, batch", "batch"),
    ("to serial", "ratio_to_serial"),
    ("to batch", "ratio_to_batch"),
)

Generate = Callable[[list[list[int]], int], int]
"""Prompts and output tokens of each to the number of tokens generated."""


def checkpoint(name: str, folder: Path) -> Path:
    """The directory of a model, made if it is one of KNOWN."""
    if name == "smollm2":
        from pegainfer_llama.smollm2 import ensure_checkpoint

        return ensure_checkpoint()
    if name == "qwen3-60m":
        from random_checkpoint import write_checkpoint

        return write_checkpoint(folder / name, name, torch_dtype="bfloat16")  # as published checkpoints store values
    return Path(name)


def pegainfer_generate(model: str, dtype: str) -> Generate:
    """Ours, offline: all prompts are submitted at once."""
    from pegainfer_core import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, prefix_cache=False)

    def generate(many: list[list[int]], output_tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        return sum(completion.num_output_tokens for completion in llm.generate(list(many), params))

    return generate


def transformers_generate(model: str, dtype: str, *, batch: bool) -> Generate:
    """The peer: greedy, with its default cache, no early stop."""
    import torch
    from transformers import AutoModelForCausalLM

    peer: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def generate(many: list[list[int]], output_tokens: int) -> int:
        groups = [many] if batch else [[prompt] for prompt in many]
        total = 0
        for group in groups:
            ids = torch.tensor(group)
            with torch.inference_mode():
                output = peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=output_tokens,
                    min_new_tokens=output_tokens,
                    pad_token_id=0,
                )
            total += output.shape[0] * (output.shape[1] - ids.shape[1])
        return total

    return generate


def timed(generate: Generate, streams: int, tokens: int, repeats: int) -> list[float]:
    """Tokens a second of each of `repeats` runs, after a short one that is not counted."""
    rates = []
    for index in range(repeats + 1):
        point = Point(
            mode="closed",
            load=streams,
            input_tokens=tokens,
            output_tokens=tokens,
            num_requests=streams,
            seed=(streams, index),
        )
        wanted = tokens if index else 4
        many = prompts(point, TOKEN_IDS)
        begun = time.perf_counter()
        generated = generate(many, wanted)
        seconds = time.perf_counter() - begun
        assert generated == streams * wanted, "EOS is ignored"
        if index:
            rates.append(generated / seconds)
    return rates


def child(engine: str, model: str, dtype: str, tokens: int, repeats: int) -> None:
    """Measure one engine in this process and print JSON: {streams: rates}."""
    ours = engine == "pegainfer"
    generate = (
        pegainfer_generate(model, dtype) if ours else transformers_generate(model, dtype, batch=engine == "batch")
    )
    # one stream is the same for both ways of calling the peer
    streams = [count for count in STREAMS if count > 1 or engine != "batch"]
    print(json.dumps({count: timed(generate, count, tokens, repeats) for count in streams}))


def measure(model: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of streams."""
    rates: dict[str, dict[str, list[float]]] = {}
    for engine in ("serial", "pegainfer", "batch"):
        command = [sys.executable, __file__, "--child", engine, "--dtype", dtype, str(model)]
        command += ["--tokens", str(arguments.tokens), "--repeats", str(arguments.repeats)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rates[engine] = json.loads(done.stdout.splitlines()[-1])
        print(f"{model.name} {dtype} {engine}: {rates[engine]}", file=sys.stderr, flush=True)
    rows = []
    for streams in STREAMS:
        row: dict[str, Any] = {"model": model.name, "dtype": dtype, "streams": streams, "tokens": arguments.tokens}
        for engine, found in rates.items():
            runs = found.get(str(streams))
            row[engine] = None if runs is None else round(statistics.median(runs), 2)
            row[f"{engine}_runs"] = None if runs is None else [round(rate, 2) for rate in runs]
        row["ratio_to_serial"] = round(row["pegainfer"] / row["serial"], 3)
        row["ratio_to_batch"] = None if row["batch"] is None else round(row["pegainfer"] / row["batch"], 3)
        rows.append(row | {"goal": GOALS[streams]})
    return rows


def main() -> None:
    """Measure all models and types, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--tokens", type=int, default=64, help="prompt tokens, and output tokens, of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    types = arguments.dtype or ["float32", "bfloat16"]
    if arguments.child:
        child(arguments.child, arguments.models[0], types[0], arguments.tokens, arguments.repeats)
        return
    import torch

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in itertools.product(arguments.models, types):
            rows += measure(checkpoint(name, Path(folder)), dtype, arguments)
    show("output tokens/s on the CPU", rows, COLUMNS)
    flags = vars(arguments) | {"threads": torch.get_num_threads()}
    finish(document("cpu peer", provenance("cpu_peer", flags), rows=rows), arguments.out)


if __name__ == "__main__":
    main()
