"""A tiny DeepSeek-V2-Lite for tests: its config.json, and a whole checkpoint with random weights. Needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pegainfer_core.testing.tiny import write_tiny_checkpoint

from pegainfer_deepseek_v2_lite.family import DeepseekV2LiteFamily

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
    "type": "yarn",
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json with 3 layers of 64, the first dense, 8 experts and 512 ids, as published. `changes` replace keys; None removes
    one."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "kv_lora_rank": 32,
        "max_position_embeddings": 1280,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_scaling": YARN,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "float32",
        "use_cache": True,
        "v_head_dim": 24,
        "vocab_size": 512,
    }
    return {key: value for key, value in (config | changes).items() if value is not None or key not in changes}


def write_tiny_deepseek_v2_lite(
    path: Path, *, shard_bytes: int | None = None, seed: int = 1234, **changes: Any
) -> Path:
    """Write a tiny checkpoint into `path`; see `tiny_config` for `changes` and `write_tiny_checkpoint` for the rest."""
    return write_tiny_checkpoint(
        path, DeepseekV2LiteFamily(), tiny_config(**changes), shard_bytes=shard_bytes, seed=seed
    )
