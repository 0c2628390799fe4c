"""A tiny Llama for tests: its config.json, and a whole checkpoint with random weights. Needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pegainfer_core.testing.tiny import write_tiny_checkpoint

from pegainfer_llama.family import LlamaFamily


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a Llama with 3 layers of 48 and 512 ids, as published. `changes` replace keys; None removes one."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 112,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 512,
    }
    return {key: value for key, value in (config | changes).items() if value is not None or key not in changes}


def write_tiny_llama(path: Path, *, shard_bytes: int | None = None, seed: int = 1234, **changes: Any) -> Path:
    """Write a tiny checkpoint into `path`; see `tiny_config` for `changes` and `write_tiny_checkpoint` for the rest."""
    return write_tiny_checkpoint(path, LlamaFamily(), tiny_config(**changes), shard_bytes=shard_bytes, seed=seed)
