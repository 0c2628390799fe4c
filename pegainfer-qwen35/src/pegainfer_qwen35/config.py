"""What Qwen3.5 reads from config.json: every key is read strictly here, or known to have no effect, or an error.

Owns both published forms: the multimodal wrapper, of which the text model is served, and the text model alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.hf_config import ConfigReader, RopeConfig, read_rope

WRAPPER_TYPE = "qwen3_5"
TEXT_TYPE = "qwen3_5_text"
LINEAR, FULL = "linear_attention", "full_attention"
FULL_ATTENTION_INTERVAL = 4
ROTARY_FRACTION = 0.25
"""Where config.json does not say, as in transformers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Sizes of the gated DeltaNet layers."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Width of the convolution."""

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """The numbers that define one Qwen3.5 model."""

    prefix: str
    """Of the text model's tensors."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    full_attention: tuple[bool, ...]
    """Of each layer; the others are gated DeltaNet."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    delta: DeltaConfig
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], ignore_keys: Sequence[str] = ()) -> Qwen35Config:
        """Read config.json. Raises ConfigError naming the key, its value and what is supported."""
        reader = ConfigReader(hf_config, "qwen35", ignore_keys)
        wrapped = hf_config.get("model_type") == WRAPPER_TYPE
        text = reader.section("text_config") if wrapped else reader
        if wrapped:
            # the vision tower is not served; its tokens never come, since images are refused
            reader.no_effect("vision_config", "image_token_id", "video_token_id")
            reader.no_effect("vision_start_token_id", "vision_end_token_id", "language_model_only")
            text.choice("model_type", [TEXT_TYPE], TEXT_TYPE)
        for each in (reader, text):
            if each.has("quantization_config"):
                raise each.error(
                    "quantization_config is set; qwen35 serves bfloat16, float16 and float32 checkpoints only"
                )
        text.choice("hidden_act", ["silu"])
        text.only("attention_bias", False)
        text.only("attn_output_gate", True)
        text.only("output_gate_type", "swish")
        text.only("mamba_ssm_dtype", "float32")
        text.no_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # the drafter is not loaded
        rope_section = text.optional_section("rope_parameters") or text.optional_section("rope_scaling")
        if rope_section is not None:
            rope_section.no_effect("mrope_section", "mrope_interleaved")  # of text, all three positions are the same
        config = cls(
            prefix="model.language_model" if wrapped else "model",
            vocab_size=text.int("vocab_size"),
            hidden_size=text.int("hidden_size"),
            intermediate_size=text.int("intermediate_size"),
            full_attention=_full_attention(text),
            num_heads=text.int("num_attention_heads"),
            num_kv_heads=text.int("num_key_value_heads"),
            head_dim=text.int("head_dim", 256),
            delta=_delta(text),
            rms_norm_eps=text.float("rms_norm_eps", above=0),
            max_position_embeddings=text.int("max_position_embeddings"),
            rope=read_rope(text, default_fraction=ROTARY_FRACTION, supported=("default", "yarn")),
            tie_word_embeddings=(text if text.has("tie_word_embeddings") else reader).bool(
                "tie_word_embeddings", False
            ),
        )
        config._check(text)
        reader.finish()
        return config

    def _check(self, reader: ConfigReader) -> None:
        """What must hold between keys."""
        for wide, narrow, heads, kv_heads in (
            ("num_attention_heads", "num_key_value_heads", self.num_heads, self.num_kv_heads),
            (
                "linear_num_value_heads",
                "linear_num_key_heads",
                self.delta.num_value_heads,
                self.delta.num_key_heads,
            ),
        ):
            if heads % kv_heads:
                raise reader.error(f"{wide} {heads} is no multiple of {narrow} {kv_heads}")
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if self.head_dim % 2 or rotary_dim % 2 or not rotary_dim:
            raise reader.error(
                f"head_dim is {self.head_dim}, of which {rotary_dim} are rotated; rotary embedding needs even numbers"
            )

    @property
    def num_layers(self) -> int:
        """Of both kinds."""
        return len(self.full_attention)

    @property
    def max_context(self) -> int:
        """Longest sequence, with rope scaling."""
        return self.rope.max_context(self.max_position_embeddings)


def _full_attention(reader: ConfigReader) -> tuple[bool, ...]:
    """From layer_types, or every so many layers."""
    num_layers = reader.int("num_hidden_layers")
    interval = reader.int("full_attention_interval", FULL_ATTENTION_INTERVAL)
    kinds = reader.str_list("layer_types", None)
    if kinds is None:
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {LINEAR, FULL}:
        raise reader.unsupported("layer_types", [f"{num_layers} of {LINEAR} and {FULL}"])
    return tuple(kind == FULL for kind in kinds)


def _delta(reader: ConfigReader) -> DeltaConfig:
    return DeltaConfig(
        num_key_heads=reader.int("linear_num_key_heads"),
        num_value_heads=reader.int("linear_num_value_heads"),
        key_dim=reader.int("linear_key_head_dim"),
        value_dim=reader.int("linear_value_head_dim"),
        taps=reader.int("linear_conv_kernel_dim", minimum=2, maximum=16),
    )
