"""config.json of every published size is accepted with its real values, and what Qwen3 lacks is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.family import ModelPlan, NoOptions
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_window_layers",
    "num_attention_heads",
    "tie_word_embeddings",
)
SIZES: dict[str, tuple[Any, ...]] = {
    "Qwen3-0.6B": (1024, 3072, 28, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 64, False),
}
PUBLISHED = {name: COMMON | dict(zip(COLUMNS, values, strict=True)) for name, values in SIZES.items()}
LONG = {"max_position_embeddings": 262144, "rope_theta": 5000000}
BASE = {"max_position_embeddings": 32768, "eos_token_id": 151643}
PUBLISHED |= {
    "Qwen3-4B-Instruct-2507": PUBLISHED["Qwen3-4B"] | LONG,
    "Qwen3-4B-Thinking-2507": PUBLISHED["Qwen3-4B"] | LONG,
    "Qwen3-0.6B-Base": PUBLISHED["Qwen3-0.6B"] | BASE,
    "Qwen3-8B-Base": PUBLISHED["Qwen3-8B"] | BASE,
}
"""Published config.json files, whole."""

BILLIONS = {
    "Qwen3-0.6B": (0.6, 0.44),
    "Qwen3-1.7B": (1.7, 1.4),
    "Qwen3-4B": (4.0, 3.6),
    "Qwen3-8B": (8.2, 6.95),
    "Qwen3-14B": (14.8, 13.2),
    "Qwen3-32B": (32.8, 31.2),
}
"""Parameters with and without embeddings, as the model cards state them."""


def plan_of(config: dict[str, Any], **engine: Any) -> ModelPlan:
    family = Qwen3Family()
    assert family.rejects(config) is None
    return family.plan(config, EngineConfig(model="model", **engine), NoOptions())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_served(name: str) -> None:
    config = PUBLISHED[name]
    plan = plan_of(config)
    assert plan.family == "qwen3"
    assert plan.dtype == "bfloat16"
    assert plan.vocab_size == 151936
    assert plan.num_layers == config["num_hidden_layers"]
    assert plan.max_context == config["max_position_embeddings"]
    assert plan.eos_token_ids == {config["eos_token_id"]}
    assert plan.config.rope.theta == config["rope_theta"]
    (group,) = plan.kv_groups
    assert (group.kind, group.num_kv_heads, group.head_dim) == ("full", 8, 128)
    assert group.layers == tuple(range(plan.num_layers))


@pytest.mark.parametrize("name", BILLIONS)
def test_published_sizes_have_their_parameters(name: str) -> None:
    rules = plan_of(PUBLISHED[name]).weight_rules
    own = sum(rule.num_values for rule in rules if rule.tied_to is None)
    tables = sum(rule.num_values for rule in rules if rule.parameter in ("embed_tokens.weight", "lm_head.weight"))
    everything = sum(rule.num_values for rule in rules)
    total, without_embeddings = BILLIONS[name]
    assert own / 1e9 == pytest.approx(total, abs=0.05)
    assert (everything - tables) / 1e9 == pytest.approx(without_embeddings, abs=0.05)


def test_the_number_of_tensors_is_the_published_one() -> None:
    sources = [source.name for rule in plan_of(PUBLISHED["Qwen3-0.6B"]).weight_rules for source in rule.sources]
    assert len(sources) == len(set(sources)) == 311
    assert "model.layers.27.self_attn.k_norm.weight" in sources
    assert "lm_head.weight" in sources


def test_the_model_cards_yarn_extends_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert plan_of(PUBLISHED["Qwen3-8B"] | {"rope_scaling": scaling}).max_context == 131072


def test_a_config_saved_by_transformers_5_is_the_same() -> None:
    published = PUBLISHED["Qwen3-4B"]
    removed = ("rope_theta", "rope_scaling", "torch_dtype", "transformers_version")
    saved = {key: value for key, value in published.items() if key not in removed} | {
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 36,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "transformers_version": "5.24.0",
    }
    assert plan_of(saved) == plan_of(published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; qwen3 supports 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is true; qwen3 supports false"),
        ({"attention_bias": True}, "attention_bias is true; qwen3 supports false"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "supports '4 times full_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "supports '4 times full_attention'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set; qwen3 serves bfloat16"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic'; qwen3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'default', 'linear', 'yarn', 'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "colour": 1}}, "rope_scaling.colour = 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"eos_token_id": "im_end"}, "eos_token_id is 'im_end'"),
    ],
)
def test_what_is_lacking_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(tiny_config(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_key_may_be_ignored_on_request() -> None:
    config = tiny_config(use_sliding_window=True)
    assert plan_of(config, ignore_config_keys=("use_sliding_window",)) == plan_of(tiny_config())


def test_window_keys_without_a_window_have_no_effect() -> None:
    assert plan_of(tiny_config(sliding_window=4096, use_sliding_window=None)) == plan_of(tiny_config())


@pytest.mark.parametrize(("eos", "expected"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
def test_eos_is_an_id_or_a_list(eos: Any, expected: set[int]) -> None:
    assert plan_of(tiny_config(eos_token_id=eos)).eos_token_ids == expected


def test_reasons_name_what_differs() -> None:
    family = Qwen3Family()
    assert family.rejects({"model_type": "qwen3_moe"}) == "model_type is 'qwen3_moe', not 'qwen3'"
    classifier = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}
    reason = family.rejects(classifier)
    assert reason == "architectures is ['Qwen3ForSequenceClassification'], not ['Qwen3ForCausalLM']"
    assert family.rejects({"model_type": "qwen3"}) is None, "architectures may be absent"
