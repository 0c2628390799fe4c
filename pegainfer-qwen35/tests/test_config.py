"""config.json of published sizes is accepted with its real values, and what Qwen3.5 lacks here is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.family import ModelPlan, NoOptions
from pegainfer_qwen35.family import Qwen35Family
from pegainfer_qwen35.testing import ROPE, tiny_config, tiny_text_config

SIZES: dict[str, tuple[Any, ...]] = {
    "Qwen3.5-4B": (2560, 9216, 32, 16, 4, 32, True),
    "Qwen3.5-9B": (4096, 12288, 32, 16, 4, 32, False),
    "Qwen3.5-27B": (5120, 17408, 64, 24, 4, 48, False),
}
COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
    "tie_word_embeddings",
)
BILLIONS = {"Qwen3.5-4B": 4.2, "Qwen3.5-9B": 9.0, "Qwen3.5-27B": 26.9}
"""Parameters of the text model."""


def published(name: str) -> dict[str, Any]:
    """A published config.json."""
    sizes = dict(zip(COLUMNS, SIZES[name], strict=True))
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return tiny_config(
        **sizes,
        dtype="bfloat16",
        eos_token_id=248044,
        head_dim=256,
        layer_types=kinds * (sizes["num_hidden_layers"] // 4),
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters=ROPE | {"mrope_section": [11, 11, 10]},
        vocab_size=248320,
    )


def plan_of(config: dict[str, Any], **engine: Any) -> ModelPlan:
    family = Qwen35Family()
    assert family.rejects(config) is None
    return family.plan(config, EngineConfig(model="model", **engine), NoOptions())


@pytest.mark.parametrize("name", SIZES)
def test_published_configs_are_served(name: str) -> None:
    plan = plan_of(published(name))
    assert (plan.dtype, plan.vocab_size, plan.max_context) == ("bfloat16", 248320, 262144)
    assert plan.eos_token_ids == {248044}
    full, state = plan.kv_groups
    assert (full.kind, full.num_kv_heads, full.head_dim) == ("full", 4, 256)
    assert full.layers == tuple(range(3, plan.num_layers, 4))
    assert len(full.layers) + len(state.layers) == plan.num_layers
    rope = plan.config.rope
    assert (rope.theta, rope.rotary_dim(256)) == (1e7, 64)
    own = sum(rule.num_values for rule in plan.weight_rules if rule.tied_to is None)
    assert own / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)


def test_state_of_a_request_at_4b() -> None:
    """24 layers of 32 float32 matrices, and four inputs of a convolution over 8192 channels."""
    group = plan_of(published("Qwen3.5-4B")).kv_groups[1]
    assert group.bytes_per_slot(2) == 24 * (32 * 128 * 128 * 4 + 4 * 8192 * 2) == 51_904_512


def test_tensors_have_their_published_names() -> None:
    sources = {
        source.name: source.shape for rule in plan_of(published("Qwen3.5-4B")).weight_rules for source in rule.sources
    }
    layer = "model.language_model.layers.0.linear_attn"
    assert sources[f"{layer}.in_proj_qkv.weight"] == (8192, 2560)
    assert sources[f"{layer}.conv1d.weight"] == (8192, 1, 4)
    assert sources[f"{layer}.A_log"] == sources[f"{layer}.dt_bias"] == (32,)
    assert sources["model.language_model.layers.3.self_attn.q_proj.weight"] == (2 * 16 * 256, 2560)
    assert "model.language_model.norm.weight" in sources
    assert "lm_head.weight" in sources


def test_layer_types_follow_from_the_interval_where_they_are_not_listed() -> None:
    listed, computed = plan_of(tiny_config()), plan_of(tiny_config(layer_types=None))
    assert computed == listed
    assert plan_of(tiny_config(layer_types=None, full_attention_interval=2)).kv_groups[0].layers == (1, 3)


def test_the_text_model_alone_differs_in_names_only() -> None:
    wrapped, alone = plan_of(tiny_config()), plan_of(tiny_text_config())
    assert alone.config.prefix == "model"
    assert [rule.parameter for rule in alone.weight_rules] == [rule.parameter for rule in wrapped.weight_rules]
    assert alone.kv_groups == wrapped.kv_groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "text_config.hidden_act is 'gelu'; qwen35 supports 'silu'"),
        ({"attention_bias": True}, "text_config.attention_bias is true; qwen35 supports false"),
        ({"attn_output_gate": False}, "text_config.attn_output_gate is false; qwen35 supports true"),
        ({"output_gate_type": "sigmoid"}, "text_config.output_gate_type is 'sigmoid'; qwen35 supports 'swish'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "text_config.mamba_ssm_dtype is 'bfloat16'; qwen35 supports 'float32'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set; qwen35 serves bfloat16"),
        ({"layer_types": ["full_attention"] * 3}, "supports '4 of linear_attention and full_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "supports '4 of linear_attention and full_attention'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads 4 is no multiple of linear_num_key_heads 3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"rope_parameters": ROPE | {"rope_type": "dynamic"}}, "rope_parameters.rope_type is 'dynamic'; qwen35"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 in one place and 0.25 in another"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.1}}, "of which 3 are rotated"),
        ({"hidden_size": None}, "text_config.hidden_size is missing"),
        ({"num_experts": 8}, "text_config.num_experts = 8"),
    ],
)
def test_what_is_lacking_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(tiny_config(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_reasons_name_what_differs() -> None:
    family = Qwen35Family()
    moe = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    reason = "model_type is 'qwen3_5_moe': mixtures of experts are not served, dense Qwen3.5 models are"
    assert family.rejects(moe) == reason
    assert family.rejects({"model_type": "qwen3"}) == "model_type is 'qwen3', not 'qwen3_5' or 'qwen3_5_text'"
    wrong = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}
    assert family.rejects(wrong) == "architectures is ['Qwen3_5ForCausalLM'], not ['Qwen3_5ForConditionalGeneration']"
