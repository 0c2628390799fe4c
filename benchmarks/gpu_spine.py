"""First figures of the spine on a GPU: the attention kernels, and the engine in eager mode on a random checkpoint of Qwen3-4B's shape.

Owns the order of measurements and their provenance; attention_gpu.py measures the kernels. Prompts are random and distinct, the
prefix cache is off, decoding is greedy and ignores EOS. Writes one JSON file and prints it, compact, as the last line.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attention_gpu
import torch
from pegainfer_core.checkpoint import INDEX_FILE
from pegainfer_core.config import EngineConfig
from pegainfer_core.llm import LLM
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.testing.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_tokenizer
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config
from safetensors.torch import save_file

QWEN3_4B = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
LOADS = [(1, 128), (1, 1024), (8, 1024), (32, 1024), (64, 1024)]
"""(streams, prompt tokens)."""
PACKAGES = ("torch", "triton", "transformers", "pegainfer-core", "pegainfer-qwen3")


def provenance() -> dict[str, Any]:
    """What is needed to compare or repeat the figures."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": _output(query).rpartition(",")[2].strip(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "cpus": os.cpu_count(),
        "commit": os.environ.get("COMMIT") or _output(["git", "rev-parse", "HEAD"]),
        "command": ["benchmarks/gpu_spine.py", *(flag for flag in sys.argv[1:] if flag.startswith("--"))],
    }


def _output(command: list[str]) -> str:
    """What it prints; empty if there is no such program or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write_random_checkpoint(path: Path, config: dict[str, Any]) -> None:
    """A checkpoint as published, one file for each layer or so; values are drawn on the GPU."""
    family = Qwen3Family()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = family.plan(config, EngineConfig(model=str(path)), family.options())
    sources = [source for rule in plan.weight_rules if rule.tied_to is None for source in rule.sources]
    shards: dict[str, dict[str, torch.Tensor]] = {}
    weight_map: dict[str, str] = {}
    for source in sources:
        values = torch.randn(source.shape, dtype=torch.bfloat16, device="cuda")
        values = 1 + 0.1 * values if len(source.shape) == 1 else 0.02 * values
        layer = source.name.partition("layers.")[2].partition(".")[0] or "rest"
        weight_map[source.name] = f"model-{layer}.safetensors"
        shards.setdefault(weight_map[source.name], {})[source.name] = values.cpu()
    for file, tensors in shards.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    write_tiny_tokenizer(path)


def engine_figures(path: Path, loads: list[tuple[int, int]], output_tokens: int) -> dict[str, Any]:
    """Start, then for each load the time to all first tokens and the pace after them."""
    begun = time.perf_counter()
    with LLM(str(path), prefix_cache=False) as llm:
        info = llm.info
        start = {"seconds": round(time.perf_counter() - begun, 2), "timeline": info.timeline}
        facts = {"dtype": info.dtype, "attention": info.attention_backend, "pages": info.num_pages}
        figures = []
        for number, (streams, prompt_tokens) in enumerate(loads, start=1):
            # the first run of a shape compiles kernels
            _seconds(llm, streams, prompt_tokens, 4, seed=3 * number)
            first = _seconds(llm, streams, prompt_tokens, 1, seed=3 * number + 1)
            whole = _seconds(llm, streams, prompt_tokens, output_tokens, seed=3 * number + 2)
            pace = (whole - first) / (output_tokens - 1)
            load = {"streams": streams, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
            figures.append(
                load
                | {"first_token_ms": round(first * 1e3, 1), "step_ms": round(pace * 1e3, 2)}
                | {"output_tokens_s": round(streams * output_tokens / whole, 1)}
            )
            print(f"  {figures[-1]}", flush=True)
    return {"start": start, **facts, "loads": figures}


def _seconds(llm: LLM, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    size = (streams, prompt_tokens)
    prompts = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, size, generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    begun = time.perf_counter()
    completions = llm.generate(prompts, params)
    took = time.perf_counter() - begun
    assert statistics.mean(len(completion.token_ids) for completion in completions) == output_tokens
    return took


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the JSON")
    parser.add_argument("--sweep", action="store_true", help="also try other tiles and splits (minutes)")
    parser.add_argument("--layers", type=int, default=36, help="layers of the random checkpoint")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"provenance": provenance(), "attention": attention_gpu.measure()}
    torch.cuda.empty_cache()
    print("engine", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(**(QWEN3_4B | {"num_hidden_layers": arguments.layers}))
        write_random_checkpoint(Path(folder), config)
        result["engine"] = engine_figures(Path(folder), LOADS, 128)
    line = json.dumps(result, separators=(",", ":"))
    _write(arguments.out, result)
    if arguments.sweep:
        result["sweep"] = attention_gpu.sweep()
        _write(arguments.out, result)
    print(line)


def _write(file: Path, result: dict[str, Any]) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
