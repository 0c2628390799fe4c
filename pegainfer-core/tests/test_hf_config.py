"""config.json: strict types, no key skipped silently, rope in every spelling, as transformers understands it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.errors import ConfigError
from pegainfer_core.hf_config import (
    ConfigReader,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
    read_dtype,
    read_eos,
    read_rope,
)


def reader(config: Mapping[str, Any], *ignore: str) -> ConfigReader:
    return ConfigReader(config, "qwen3", ignore)


# typed reads


def test_values_of_the_right_type() -> None:
    config = {"i": 3, "f": 1e-6, "whole": 2, "b": False, "s": "x", "ints": [1, -2], "names": ["a"], "none": []}
    read = reader(config)
    assert read.int("i") == 3
    assert read.float("f") == 1e-6
    assert isinstance(read.float("whole"), float)
    assert read.bool("b") is False
    assert read.str("s") == "x"
    assert read.int_list("ints") == (1, -2)
    assert read.str_list("names") == ("a",)
    assert read.int_list("none") == ()
    assert read.choice("s", ("y", "x")) == "x"
    read.finish()


READS: dict[str, Callable[[ConfigReader], Any]] = {
    "int": lambda read: read.int("key"),
    "float": lambda read: read.float("key"),
    "bool": lambda read: read.bool("key"),
    "str": lambda read: read.str("key"),
    "int_list": lambda read: read.int_list("key"),
    "str_list": lambda read: read.str_list("key"),
    "choice": lambda read: read.choice("key", ("a", "b")),
    "section": lambda read: read.section("key"),
}


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("config", [{}, {"key": None}])
def test_missing_key_is_named_with_the_family(kind: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: key is missing; qwen3 needs it$"):
        READS[kind](reader(config))


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("int", True, "true"),
        ("int", 4.0, "4.0"),
        ("int", "4", "'4'"),
        ("int", 0, "0"),
        ("int", -1, "-1"),
        ("int", [1], r"\[1\]"),
        ("float", "1e-6", "'1e-6'"),
        ("float", True, "true"),
        ("float", float("nan"), "nan"),
        ("float", float("inf"), "inf"),
        ("float", 10**400, "1000"),
        ("bool", 0, "0"),
        ("bool", "false", "'false'"),
        ("str", 1, "1"),
        ("int_list", [1, True], r"\[1, True\]"),
        ("int_list", [1, 2.0], r"\[1, 2.0\]"),
        ("int_list", 1, "1"),
        ("str_list", ["a", 1], r"\['a', 1\]"),
        ("str_list", "ab", "'ab'"),
        ("section", 5, "5"),
        ("section", [1], r"\[1\]"),
    ],
)
def test_wrong_type_is_an_error_with_the_value(kind: str, value: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: key is {shown}[0.]*; qwen3 needs (an?|true|[a-z ]*list) "):
        READS[kind](reader({"key": value}))


def test_unsupported_choice_names_what_is_supported() -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: hidden_act is 'gelu'; qwen3 supports 'silu'$"):
        reader({"hidden_act": "gelu"}).choice("hidden_act", ("silu",))
    with pytest.raises(ConfigError, match="bits is true; qwen3 supports 1, 2"):
        reader({"bits": True}).choice("bits", (1, 2))


def test_defaults_hold_for_absent_and_null() -> None:
    for read in (reader({}), reader({"key": None})):
        assert read.int("key", 7) == 7
        assert read.int("key", None) is None
        assert read.float("key", 0.5) == 0.5
        assert read.bool("key", True) is True
        assert read.str("key", None) is None
        assert read.choice("key", ("silu",), "silu") == "silu"
        assert read.optional_section("key") is None


def test_bounds() -> None:
    assert reader({"key": 0}).int("key", minimum=0) == 0
    with pytest.raises(ConfigError, match="an integer of at least 2"):
        reader({"key": 1}).int("key", minimum=2)
    with pytest.raises(ConfigError, match="a finite number above 0"):
        reader({"key": 0}).float("key", above=0)


# what nobody read


def test_unread_keys_are_all_named() -> None:
    read = reader({"known": 1, "zebra": 2, "attn_temperature": 1.5})
    read.int("known")
    with pytest.raises(ConfigError) as caught:
        read.finish()
    assert str(caught.value) == (
        "config.json: qwen3 does not know attn_temperature = 1.5, zebra = 2, which may change the results; "
        "to serve it as if absent, pass --ignore-config-keys attn_temperature --ignore-config-keys zebra"
    )


def test_ignored_keys_pass() -> None:
    reader({"zebra": 2, "yak": {"a": 1}}, "zebra", "yak").finish()


def test_a_flag_without_use_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--ignore-config-keys zebra: config\.json has no such key"):
        reader({"yak": None}, "zebra").finish()
    read = reader({"heads": 2}, "heads")
    read.int("heads")
    with pytest.raises(ConfigError, match="--ignore-config-keys heads: qwen3 uses this key; it cannot be ignored"):
        read.finish()


@pytest.mark.parametrize("empty", [None, [], {}, ""])
def test_empty_values_are_harmless(empty: Any) -> None:
    reader({"anything": empty}).finish()


OFF = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "layer_types": ["full_attention", "full_attention"],
}
ON = {
    "attention_bias": True,
    "mlp_bias": True,
    "attention_dropout": 0.1,
    "pretraining_tp": 2,
    "use_sliding_window": True,
    "rope_interleaved": True,
    "is_encoder_decoder": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "quantization_config": {"quant_method": "fp8"},
    "attn_logit_softcapping": 50.0,
}


@pytest.mark.parametrize("key", OFF)
def test_features_that_are_off_need_no_reader(key: str) -> None:
    reader({key: OFF[key]}).finish()


@pytest.mark.parametrize("key", ON)
def test_features_that_are_on_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"does not know {key} = "):
        reader({key: ON[key]}).finish()


def test_off_values_are_compared_with_their_type() -> None:
    with pytest.raises(ConfigError, match="attention_bias = 0"):
        reader({"attention_bias": 0}).finish()
    with pytest.raises(ConfigError, match="pretraining_tp = true"):
        reader({"pretraining_tp": True}).finish()


def test_sliding_window_is_harmless_only_where_it_is_switched_off() -> None:
    reader({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}).finish()
    reader({"sliding_window": None}).finish()
    for config in ({"sliding_window": 4096}, {"use_sliding_window": True, "sliding_window": 4096}):
        with pytest.raises(ConfigError, match="sliding_window = 4096"):
            reader(config).finish()


def test_only_checks_a_feature_the_family_lacks() -> None:
    for config in ({}, {"bias": None}, {"bias": False}):
        read = reader(config)
        read.only("bias", False)
        read.finish()
    with pytest.raises(ConfigError, match="bias is true; qwen3 supports false"):
        reader({"bias": True}).only("bias", False)
    ignored = reader({"bias": True}, "bias")
    ignored.only("bias", False)
    ignored.finish()


def test_no_effect_is_for_keys_of_the_family() -> None:
    read = reader({"max_window_layers": 3})
    read.no_effect("max_window_layers", "another")
    read.finish()


def test_sections_carry_their_path() -> None:
    read = reader({"text_config": {"hidden_size": 8, "odd": 1, "rope": {"x": 2}}}, "text_config.rope.x")
    section = read.section("text_config")
    assert section.int("hidden_size") == 8
    assert section.optional_section("rope") is not None
    with pytest.raises(ConfigError, match=r"config\.json: text_config\.layers is missing"):
        section.int("layers")
    with pytest.raises(ConfigError, match=r"does not know text_config\.odd = 1, which"):
        read.finish()


# published configs, whole

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SIZES = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


def read_dense(config: Mapping[str, Any]) -> RopeConfig:
    """What a dense decoder reads; everything else has to be harmless."""
    read = reader(config)
    for key in SIZES:
        read.int(key)
    read.float("rms_norm_eps", above=0)
    read.choice("hidden_act", ("silu",))
    rope = read_rope(read)
    read.finish()
    return rope


def test_a_published_config_has_no_key_left_over() -> None:
    assert read_dense(QWEN3_06B) == RopeConfig(theta=1e6)
    assert read_dtype(QWEN3_06B) == "bfloat16"


def test_configs_saved_by_transformers_have_no_key_left_over(tmp_path: Path) -> None:
    from transformers import LlamaConfig, Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 5e5}
    for config in (Qwen3Config(rope_parameters=rope), LlamaConfig(rope_parameters=rope)):
        for use_diff in (False, True):
            config.to_json_file(tmp_path / "config.json", use_diff=use_diff)
            saved = json.loads((tmp_path / "config.json").read_text())
            # what `use_diff` leaves out are the class's own defaults, which a family knows
            whole = {key: getattr(config, key) for key in (*SIZES, "rms_norm_eps", "hidden_act")} | saved
            assert read_dense(whole) == RopeConfig(theta=5e5)


# rope


def rope_of(config: Mapping[str, Any], **kwargs: Any) -> RopeConfig:
    read = reader({"max_position_embeddings": 4096, "rope_theta": 1e4, **config})
    read.int("max_position_embeddings")
    rope = read_rope(read, **kwargs)
    read.finish()
    return rope


YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        ({"rope_type": "yarn", **YARN}, YarnScaling(factor=4.0, original_max_position_embeddings=1024)),
        (
            {
                "rope_type": "yarn",
                **YARN,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 1,
                "attention_factor": 1.25,
                "truncate": False,
            },
            YarnScaling(
                factor=4.0,
                original_max_position_embeddings=1024,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.7,
                mscale_all_dim=1.0,
                attention_factor=1.25,
                truncate=False,
            ),
        ),
        ({"rope_type": "yarn", "factor": 2}, YarnScaling(factor=2.0, original_max_position_embeddings=4096)),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
            YarnScaling(factor=8.0, original_max_position_embeddings=512),
        ),
        (
            {"rope_type": "llama3", **LLAMA3},
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        ),
    ],
)
def test_both_spellings_read_the_same(scaling: dict[str, Any], expected: Any) -> None:
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    spellings: list[dict[str, Any]] = [
        {"rope_scaling": scaling},
        {"rope_scaling": older},
        {"rope_scaling": {**older, **scaling}},
        {"rope_parameters": {"rope_theta": 1e4, **scaling}, "rope_theta": None},
        {"rope_parameters": {"rope_theta": 10000, **scaling}},
        {"rope_parameters": {"rope_theta": 1e4, **scaling}, "rope_scaling": older},
    ]
    for spelling in spellings:
        assert rope_of(spelling) == RopeConfig(theta=1e4, scaling=expected)


def test_attention_factor_of_yarn_is_the_one_of_transformers() -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    extras: list[dict[str, Any]] = [
        {},
        {"attention_factor": 1.5},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"mscale": 0, "mscale_all_dim": 1.0},
        {"factor": 1.0},
    ]
    for extra in extras:
        scaling = {"rope_type": "yarn", **YARN, **extra}
        config = Qwen3Config(rope_parameters={"rope_theta": 1e4, **scaling}, max_position_embeddings=4096)
        _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
        read = rope_of({"rope_scaling": scaling}).scaling
        assert isinstance(read, YarnScaling)
        assert read.attention_scaling == pytest.approx(expected, rel=1e-12)


def test_context_that_the_scaling_supports() -> None:
    def context(scaling: dict[str, Any], positions: int) -> int:
        return rope_of({"rope_scaling": scaling, "max_position_embeddings": positions}).max_context(positions)

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert context(yarn, 40960) == 131_072
    assert context(yarn, 262_144) == 262_144
    assert context({"rope_type": "llama3", **LLAMA3}, 131_072) == 131_072
    assert context({"rope_type": "linear", "factor": 8}, 16_384) == 16_384
    assert context({}, 40960) == 40960


def test_unknown_rope_type_names_the_supported_ones() -> None:
    for key in ("type", "rope_type"):
        with pytest.raises(
            ConfigError,
            match=rf"rope_scaling\.{key} is 'dynamic'; qwen3 supports 'default', 'linear', 'yarn', 'llama3'",
        ):
            rope_of({"rope_scaling": {key: "dynamic", "factor": 2}})
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type is 'yarn'; qwen3 supports 'default'$"):
        rope_of({"rope_parameters": {"rope_type": "yarn", **YARN}}, supported=("default",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": 0}, "rope_theta is 0; qwen3 needs a finite number above 0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, r"rope_theta is 10000 but rope_parameters\.rope_theta is 1e\+06"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, r"\.type is 'linear' but .*\.rope_type is 'yarn'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"rope_scaling\.factor is 0\.5; qwen3 needs .* at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"rope_scaling\.factor is '2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"rope_scaling\.low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "high_freq_factor 1 is not above low_freq_factor 1"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 0.5}}, r"beta_fast 0\.5 is below beta_slow 1"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": True}}, r"attention_factor is true"),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 99},
            r"original_max_position_embeddings is 99 but rope_scaling\.original_max_position_embeddings is 1024",
        ),
        ({"rope_scaling": {"rope_type": "default", "factor": 4}}, r"does not know rope_scaling\.factor = 4"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "finetuned": True}}, r"does not know rope_scaling\.finetuned = true"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; qwen3 needs an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; qwen3 supports 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, r"rope_parameters\.partial_rotary_factor is 0\.25"),
        ({"original_max_position_embeddings": 1024}, "does not know original_max_position_embeddings = 1024"),
    ],
)  # fmt: skip
def test_rope_errors(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_of(config)


def test_theta_default_is_the_familys() -> None:
    read = reader({})
    assert read_rope(read, default_theta=1e4) == RopeConfig(theta=1e4)
    assert read_rope(reader({"rope_scaling": {"rope_type": "default"}}), default_theta=1e4).theta == 1e4


# dtype and EOS


def test_dtype_spellings() -> None:
    assert read_dtype({"torch_dtype": "float16"}) == "float16"
    assert read_dtype({"dtype": "torch.bfloat16"}) == "bfloat16"
    assert read_dtype({"dtype": "bfloat16", "torch_dtype": "bfloat16"}) == "bfloat16"
    assert read_dtype({"dtype": None}) == read_dtype({}) == "float32"
    with pytest.raises(ConfigError, match="dtype is 'bfloat16' but torch_dtype is 'float32'"):
        read_dtype({"dtype": "bfloat16", "torch_dtype": "float32"})
    for value in ("float64", "float8_e4m3fn", 16, {"text_config": "bfloat16"}):
        with pytest.raises(ConfigError, match=r"dtype is .*; supported are 'float32', 'bfloat16', 'float16'"):
            read_dtype({"dtype": value})


def test_eos_is_the_union() -> None:
    """B5."""
    assert read_eos({}, {}) == frozenset()
    assert read_eos({"eos_token_id": 2}) == {2}
    assert read_eos({"eos_token_id": 0}, {"eos_token_id": [1, 0]}) == {0, 1}
    assert read_eos({"eos_token_id": None}, {"eos_token_id": []}) == frozenset()


@pytest.mark.parametrize("value", ["2", True, -1, [1, "2"], [None], 1.0, {"id": 2}])
def test_eos_of_another_type(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^generation_config\.json: eos_token_id is .*; it must be a token id or a list"
    ):
        read_eos({"eos_token_id": 2}, {"eos_token_id": value})
