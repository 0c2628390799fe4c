"""Tiny random checkpoints in the published layout, written from a family's own weight rules.

Owns random weights and files. Needs neither transformers nor a network. Weights are wider than a trained model's, so
that greedy output is varied and an error anywhere shows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pegainfer_core.checkpoint import INDEX_FILE, SINGLE_FILE
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelFamily, ModelPlan, TensorSpec
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, PAD_ID, write_tiny_tokenizer


def write_tiny_checkpoint(
    path: Path,
    family: ModelFamily,
    hf_config: Mapping[str, Any],
    *,
    seed: int = 1234,
    gain: float = 0.15,
    shard_bytes: int | None = None,
    write_tied: bool = False,
) -> Path:
    """Write configs, weights and a tokenizer of 512 ids into the directory `path`, created if need be; returns `path`.

    Weights are of the type that config.json names: matrices normal with deviation `gain`, norms around 1. A tensor's
    values depend on `seed`, its name and its shape alone. `shard_bytes` writes shards of at most that size (and at
    least one tensor), else there is one file. `write_tied` writes a tied tensor too, equal to the one it is tied to, as
    some publishers do.
    """
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", dict(hf_config))
    _write_json(path / "generation_config.json", {"eos_token_id": [EOS_ID], "pad_token_id": PAD_ID})
    plan = family.plan(hf_config, EngineConfig(model=str(path)), family.options())
    tensors = dict(_tensors(plan, seed, gain, write_tied))
    if shard_bytes is None:
        save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    else:
        _write_shards(path, tensors, shard_bytes)
    write_tiny_tokenizer(path)
    return path


def _tensors(plan: ModelPlan, seed: int, gain: float, write_tied: bool) -> Iterator[tuple[str, Tensor]]:
    sources = {rule.parameter: rule.sources for rule in plan.weight_rules}
    dtype: torch.dtype = getattr(torch, plan.dtype)
    for rule in plan.weight_rules:
        if rule.tied_to is not None and not write_tied:
            continue
        originals = rule.sources if rule.tied_to is None else sources[rule.tied_to]
        for source, original in zip(rule.sources, originals, strict=True):
            yield source.name, _random(original, seed, gain, rule.offset).to(dtype)


def _random(spec: TensorSpec, seed: int, gain: float, offset: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
    if spec.name.endswith("_log"):  # of a rate: some heads of a recurrent layer forget at once, some keep for long
        return torch.empty(spec.shape).uniform_(-4.0, 1.0, generator=generator)
    values = torch.randn(spec.shape, generator=generator)
    return 1 - offset + 0.1 * values if "norm" in spec.name and len(spec.shape) == 1 else gain * values


def _write_shards(path: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        size = sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes
        if shards[-1] and size > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(path / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
