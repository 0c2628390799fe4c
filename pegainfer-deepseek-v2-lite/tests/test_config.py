"""config.json of DeepSeek-V2-Lite: published sizes, both spellings, and a refusal by name of what is not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.family import ModelPlan
from pegainfer_core.testing.reference import transformers_logits
from pegainfer_deepseek_v2_lite.family import DeepseekV2LiteFamily
from pegainfer_deepseek_v2_lite.testing import YARN, tiny_config, write_tiny_deepseek_v2_lite

PUBLISHED = tiny_config(
    bos_token_id=100000,
    eos_token_id=100001,
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rope_scaling={**YARN, "original_max_position_embeddings": 4096},
    torch_dtype="bfloat16",
    v_head_dim=128,
    vocab_size=102400,
)


def plan_of(config: dict[str, Any], **settings: Any) -> ModelPlan:
    family = DeepseekV2LiteFamily()
    return family.plan(config, EngineConfig(model="model", **settings), family.options())


def test_the_published_model_has_its_size() -> None:
    plan = plan_of(PUBLISHED)
    assert sum(rule.num_values for rule in plan.weight_rules) / 1e9 == pytest.approx(15.7, abs=0.05)
    (group,) = plan.kv_groups
    assert (group.kind, group.values_per_token, len(group.layers)) == ("latent", 576, 27)
    assert plan.max_context == 163840
    assert plan.eos_token_ids == {100001}
    assert plan.dtype == "bfloat16"
    # 192 ** -0.5, times the square of 0.1 * 0.707 * ln(40) + 1
    assert plan.config.softmax_scale == pytest.approx(0.11472138679, rel=1e-9)


def test_every_expert_has_its_own_tensors() -> None:
    names = [source.name for rule in plan_of(PUBLISHED).weight_rules for source in rule.sources]
    assert len(names) == len(set(names)) == 27 * 7 + 3 + 26 * (1 + 64 * 3 + 3) + 3
    assert "model.layers.0.mlp.gate_proj.weight" in names, "the first layer is dense"
    assert "model.layers.26.mlp.experts.63.down_proj.weight" in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; deepseek-v2-lite supports 'silu'"),
        ({"attention_bias": True}, "attention_bias is true; deepseek-v2-lite supports false"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; deepseek-v2-lite supports 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; deepseek-v2-lite supports 'softmax'"),
        ({"topk_method": "noaux_tc"}, "'greedy', 'group_limited_greedy'"),
        ({"norm_topk_prob": True}, "norm_topk_prob is true; deepseek-v2-lite supports false"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; deepseek-v2-lite supports 4"),
        ({"head_dim": 48}, "head_dim is 48; deepseek-v2-lite supports 16"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; rotary embedding needs an even number"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
        ({"num_experts_per_tok": 9}, "9 experts cannot be chosen of 8"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "8 experts cannot be divided into 3 groups",
        ),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"index_topk": 2048}, "index_topk = 2048"),
    ],
)
def test_what_is_lacking_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(tiny_config(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_groups_have_no_effect_on_a_greedy_router() -> None:
    assert plan_of(tiny_config(n_group=4, topk_group=2)) == plan_of(tiny_config())


def test_transformers_takes_no_notice_of_normalised_weights(tmp_path: Path) -> None:
    """Why norm_topk_prob is refused: the published code divides the weights by their sum, and its reference here does not."""
    prompt = list(range(20, 40))
    (plain,) = transformers_logits(write_tiny_deepseek_v2_lite(tmp_path / "plain"), [prompt])
    normalised = write_tiny_deepseek_v2_lite(tmp_path / "other")
    text = (normalised / "config.json").read_text(encoding="utf-8")
    assert '"norm_topk_prob": false' in text
    (normalised / "config.json").write_text(text.replace('"norm_topk_prob": false', '"norm_topk_prob": true'))
    assert torch.equal(transformers_logits(normalised, [prompt])[0], plain)


def test_transformers_applies_yarn_to_scores_as_published(tmp_path: Path) -> None:
    """mscale_all_dim changes scores alone where mscale is as large; the conformance kit compares the numbers."""
    prompt = list(range(20, 40))
    (published,) = transformers_logits(write_tiny_deepseek_v2_lite(tmp_path / "published"), [prompt])
    changed = {**YARN, "mscale": 0.0001, "mscale_all_dim": 0.0001}
    (without,) = transformers_logits(write_tiny_deepseek_v2_lite(tmp_path / "without", rope_scaling=changed), [prompt])
    assert float((published - without).abs().max()) > 1e-2
