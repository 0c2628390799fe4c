"""Random checkpoints of a published shape, for measuring: values do not matter for speed, shapes and vocabulary do.

Owns configs, weights drawn on the device that is there, and a tokenizer with as many entries as the model's vocabulary, so that
loading it and turning ids into text cost what they would. Any engine that reads Hugging Face checkpoints can serve them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pegainfer_qwen3.testing
import pegainfer_qwen35.testing
import torch
from pegainfer_core.checkpoint import INDEX_FILE
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelFamily, ModelPlan
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, PAD_ID, tiny_tokenizer, write_tiny_tokenizer
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen35.family import Qwen35Family
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
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
    },
    "qwen3-60m": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 4096,
        "max_window_layers": 12,
        "vocab_size": 42000,
        "torch_dtype": "float32",
    },
}
SHAPES["qwen35-4b"] = {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "layer_types": None,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 0,
    "rope_parameters": pegainfer_qwen35.testing.ROPE | {"mrope_section": [11, 11, 10]},
    "vocab_size": 248320,
    "dtype": "bfloat16",
}
FAMILIES: dict[str, tuple[ModelFamily, Callable[..., dict[str, Any]]]] = {
    "qwen3": (Qwen3Family(), pegainfer_qwen3.testing.tiny_config),
    "qwen35": (Qwen35Family(), pegainfer_qwen35.testing.tiny_config),
}
"""By the first part of a shape's name."""
IMAGES = {
    "do_rescale": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}
"""Other engines look at how images are prepared even where none will come."""
WRITERS = 8
"""Threads that write files."""


def write_checkpoint(path: Path, shape: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint of one of SHAPES with `changes` to its config into `path`, made if need be; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    family, tiny_config = FAMILIES[shape.partition("-")[0]]
    config = tiny_config(**(SHAPES[shape] | changes))
    plan = family.plan(config, EngineConfig(model=str(path)), family.options())
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": [EOS_ID], "pad_token_id": PAD_ID})
    if "vision_config" in config:
        _write_json(path / "preprocessor_config.json", IMAGES)
        _write_json(path / "video_preprocessor_config.json", IMAGES | {"video_processor_type": "Qwen3VLVideoProcessor"})
    write_full_tokenizer(path, plan.vocab_size)
    _write_weights(path, plan, seed)
    return path


def _write_weights(path: Path, plan: ModelPlan, seed: int) -> None:
    """One file for each layer, and one for the rest."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for source in (source for rule in plan.weight_rules if rule.tied_to is None for source in rule.sources):
        values = torch.randn(source.shape, dtype=dtype, device=device, generator=generator)
        values = 1 + 0.1 * values if len(source.shape) == 1 else 0.02 * values
        layer = source.name.partition("layers.")[2].partition(".")[0] or "rest"
        shards.setdefault(f"model-{layer}.safetensors", {})[source.name] = values.cpu()
    with ThreadPoolExecutor(WRITERS) as pool:
        writes = [pool.submit(save_file, tensors, path / file, {"format": "pt"}) for file, tensors in shards.items()]
        for write in writes:
            write.result()
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    _write_json(path / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_full_tokenizer(path: Path, vocab_size: int) -> None:
    """The tiny tokenizer with further entries, each a merge of two that are there, up to `vocab_size`; all of them ASCII."""
    write_tiny_tokenizer(path)
    content = json.loads(tiny_tokenizer().to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    merges: list[list[str]] = content["model"]["merges"]
    words = [
        piece for piece in vocab if piece.replace("\u0120", "").isalpha() and piece.replace("\u0120", "").isascii()
    ]
    firsts = list(words)
    for first in firsts:  # grows, so that there is no end to what can be merged
        for second in words[: vocab_size - len(vocab)]:
            if first + second not in vocab:
                vocab[first + second] = len(vocab)
                merges.append([first, second])
                firsts.append(first + second)
        if len(vocab) == vocab_size:
            break
    (path / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.shape)


if __name__ == "__main__":
    main()
