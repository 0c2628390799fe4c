"""A tiny Qwen3 for tests: its config.json, and a whole checkpoint with random weights. Needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pegainfer_core.testing.tiny import write_tiny_checkpoint

from pegainfer_qwen3.family import Qwen3Family


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a Qwen3 with 4 layers of 64 and 512 ids, as published. `changes` replace keys; None removes one."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "max_window_layers": 4,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 512,
    }
    return {key: value for key, value in (config | changes).items() if value is not None or key not in changes}


def write_tiny_qwen3(path: Path, *, shard_bytes: int | None = None, seed: int = 1234, **changes: Any) -> Path:
    """Write a tiny checkpoint into `path`; see `tiny_config` for `changes` and `write_tiny_checkpoint` for the rest."""
    return write_tiny_checkpoint(path, Qwen3Family(), tiny_config(**changes), shard_bytes=shard_bytes, seed=seed)
