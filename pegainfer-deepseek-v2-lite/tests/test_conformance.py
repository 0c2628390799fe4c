"""DeepSeek-V2-Lite passes the conformance kit: with and without YaRN, queries from a vector of their own, and experts in groups."""

from __future__ import annotations

from pegainfer_core.testing.conformance import FamilyConformance
from pegainfer_deepseek_v2_lite.family import DeepseekV2LiteFamily
from pegainfer_deepseek_v2_lite.testing import YARN, tiny_config


class TestDeepseekV2Lite(FamilyConformance):
    family = DeepseekV2LiteFamily()
    plugin = "pegainfer_deepseek_v2_lite.plugin"
    configs = {
        "as published": tiny_config(),
        "bfloat16 checkpoint": tiny_config(torch_dtype="bfloat16"),
        "no rope scaling": tiny_config(rope_scaling=None),
        "all layers of experts": tiny_config(first_k_dense_replace=0, num_hidden_layers=2),
        "two factors of YaRN": tiny_config(rope_scaling={**YARN, "mscale": 1.0}),
        "query vector, experts in groups": tiny_config(
            q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0
        ),
        "saved by transformers 5": tiny_config(
            head_dim=16,
            mlp_bias=False,
            rope_scaling=None,
            rope_theta=None,
            rope_parameters={
                **{key: YARN[key] for key in YARN if key != "type"},
                "rope_type": "yarn",
                "rope_theta": 1e4,
            },
        ),
    }
    foreign_configs = (
        {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
        {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
        {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
        {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    )
