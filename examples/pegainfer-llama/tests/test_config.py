"""Published config.json files are accepted with their real values, and what Llama lacks is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError
from pegainfer_core.family import ModelPlan, NoOptions
from pegainfer_core.hf_config import Llama3Scaling
from pegainfer_core.testing.corrupt import add_tensor
from pegainfer_core.testing.paged_model import PagedModel
from pegainfer_core.testing.tiny_chat import write_tiny_chat
from pegainfer_core.tokenizer import load_tokenizer
from pegainfer_llama.family import LLAMA3_MARK, LlamaFamily
from pegainfer_llama.testing import tiny_config, write_tiny_llama

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA_2: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


def plan_of(config: dict[str, Any], **engine: Any) -> ModelPlan:
    family = LlamaFamily()
    assert family.rejects(config) is None
    return family.plan(config, EngineConfig(model="model", **engine), NoOptions())


@pytest.mark.parametrize(
    ("config", "head_dim", "dtype", "millions"),
    [(SMOLLM2, 64, "bfloat16", 134.5), (LLAMA_2, 128, "float16", 6738.4), (LLAMA_32_1B, 64, "bfloat16", 1235.8)],
    ids=["SmolLM2-135M", "Llama-2-7b", "Llama-3.2-1B"],
)
def test_published_configs_are_served(config: dict[str, Any], head_dim: int, dtype: str, millions: float) -> None:
    plan = plan_of(config)
    (group,) = plan.kv_groups
    assert (group.num_kv_heads, group.head_dim) == (config["num_key_value_heads"], head_dim)
    assert plan.dtype == dtype
    assert plan.max_context == config["max_position_embeddings"]
    stored = sum(rule.num_values for rule in plan.weight_rules if rule.tied_to is None)
    assert stored / 1e6 == pytest.approx(millions, abs=0.06)


def test_llama_3_has_its_scaling_and_three_eos_ids() -> None:
    plan = plan_of(LLAMA_32_1B)
    assert plan.eos_token_ids == {128001, 128008, 128009}
    assert plan.config.rope.scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_llama_2_has_no_rope_theta() -> None:
    assert plan_of(LLAMA_2).config.rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama supports 'silu'"),
        ({"attention_bias": True}, "attention_bias is true; llama supports false"),
        ({"mlp_bias": True}, "mlp_bias is true; llama supports false"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"rope_interleaved": True}, "rope_interleaved = true"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set; llama serves"),
        ({"hidden_size": 49}, "hidden_size 49 is no multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 2}, "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ],
)
def test_what_is_lacking_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(tiny_config(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_old_buffers_in_llama_2_files_are_skipped(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    expected = PagedModel(LlamaFamily(), tmp_path).logits([5, 6, 7])
    name = "model.layers.2.self_attn.rotary_emb.inv_freq"
    add_tensor(tmp_path, name, beside="model.norm.weight", value=torch.ones(8))
    assert torch.equal(PagedModel(LlamaFamily(), tmp_path).logits([5, 6, 7]), expected)


@pytest.mark.parametrize(("special", "reads_calls"), [((), True), ((LLAMA3_MARK,), False)])
def test_calls_are_read_unless_it_is_llama_3(tmp_path: Path, special: tuple[str, ...], reads_calls: bool) -> None:
    tokenizer = load_tokenizer(write_tiny_chat(tmp_path, special=special))
    syntax = LlamaFamily().chat_format(tokenizer, tmp_path).syntax
    assert (syntax is not None and syntax.calls is not None) == reads_calls
