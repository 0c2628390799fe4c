"""Qwen3 passes the conformance kit: heads in groups of 1 to 8, weights tied or not, and every way to write down rope."""

from __future__ import annotations

from pegainfer_core.testing.conformance import FamilyConformance
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config

YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


class TestQwen3(FamilyConformance):
    family = Qwen3Family()
    plugin = "pegainfer_qwen3.plugin"
    configs = {
        "tied, group 2": tiny_config(),
        "untied, group 1": tiny_config(tie_word_embeddings=False, num_key_value_heads=4),
        "bfloat16 checkpoint": tiny_config(torch_dtype="bfloat16"),
        "group 4": tiny_config(num_attention_heads=8, head_dim=16),
        "group 5": tiny_config(num_attention_heads=5, num_key_value_heads=1, head_dim=16),
        "group 8": tiny_config(num_attention_heads=16, head_dim=8),
        "theta 5e6": tiny_config(rope_theta=5000000, max_position_embeddings=262144),
        "yarn, as published": tiny_config(rope_scaling={"rope_type": "yarn", **YARN}, max_position_embeddings=128),
        "yarn, old type key": tiny_config(rope_scaling={"type": "yarn", **YARN}, max_position_embeddings=128),
        "yarn, rope_parameters": tiny_config(
            rope_theta=None,
            rope_scaling=None,
            rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN},
            max_position_embeddings=128,
        ),
        "yarn, attention factor": tiny_config(rope_scaling={"rope_type": "yarn", "attention_factor": 1.3, **YARN}),
    }
    foreign_configs = (
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
        {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    )
