"""A tiny Qwen3.5 for tests: its config.json, and a whole checkpoint with random weights. Needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pegainfer_core.testing.tiny import write_tiny_checkpoint

from pegainfer_qwen35.family import Qwen35Family

ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a Qwen3.5 with 4 layers of 64 and 512 ids, as published. `changes` are of the text model's keys; None
    removes one."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "float32",
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 8192,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 512,
    }
    text = {key: value for key, value in (text | changes).items() if value is not None or key not in changes}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 508,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "video_token_id": 509,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "in_channels": 3,
            "intermediate_size": 32,
            "model_type": "qwen3_5",
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 511,
        "vision_start_token_id": 510,
    }


def tiny_text_config(**changes: Any) -> dict[str, Any]:
    """The same model without the wrapper, as transformers saves the text model alone."""
    text: dict[str, Any] = tiny_config(**changes)["text_config"]
    return text | {"architectures": ["Qwen3_5ForCausalLM"]}


def write_tiny_qwen35(path: Path, *, shard_bytes: int | None = None, seed: int = 1234, **changes: Any) -> Path:
    """Write a tiny checkpoint into `path`; see `tiny_config` for `changes` and `write_tiny_checkpoint` for the rest."""
    return write_tiny_checkpoint(path, Qwen35Family(), tiny_config(**changes), shard_bytes=shard_bytes, seed=seed)
