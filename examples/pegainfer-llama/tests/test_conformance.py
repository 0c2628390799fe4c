"""Llama passes the conformance kit."""

from __future__ import annotations

from pegainfer_core.testing.conformance import FamilyConformance
from pegainfer_llama.family import LlamaFamily
from pegainfer_llama.testing import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2}


class TestLlama(FamilyConformance):
    family = LlamaFamily()
    plugin = "pegainfer_llama.plugin"
    configs = {
        "tied, as SmolLM2": tiny_config(tie_word_embeddings=True, rope_theta=100000, is_llama_config=True),
        "as Llama 2": tiny_config(rope_theta=None, num_key_value_heads=3, head_dim=None),
        "as Llama 3": tiny_config(rope_scaling={"rope_type": "llama3", **LLAMA3}, rope_theta=500000.0),
        "llama3, rope_parameters": tiny_config(
            rope_theta=None,
            rope_scaling=None,
            rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        ),
        "linear": tiny_config(rope_scaling={"type": "linear", "factor": 2.0}),
        "yarn": tiny_config(rope_scaling={"rope_type": "yarn", **YARN}, max_position_embeddings=128),
        "float16 checkpoint": tiny_config(torch_dtype="float16"),
        "own head_dim": tiny_config(head_dim=24),
    }
    foreign_configs = (
        {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    )
