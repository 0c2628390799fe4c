"""What Qwen3 reads from config.json. Every key is read strictly here, or known to have no effect, or an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.hf_config import ConfigReader, RopeConfig, read_rope


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """The numbers that define one Qwen3 model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], ignore_keys: Sequence[str] = ()) -> Qwen3Config:
        """Read config.json. Raises ConfigError naming the key, its value and what is supported."""
        reader = ConfigReader(hf_config, "qwen3", ignore_keys)
        if reader.has("quantization_config"):
            raise reader.error(
                "quantization_config is set; qwen3 serves bfloat16, float16 and float32 checkpoints only"
            )
        reader.choice("hidden_act", ["silu"])
        reader.only("attention_bias", False)
        reader.only("use_sliding_window", False)
        reader.no_effect("sliding_window", "max_window_layers")  # without use_sliding_window
        config = cls(
            vocab_size=reader.int("vocab_size"),
            hidden_size=reader.int("hidden_size"),
            intermediate_size=reader.int("intermediate_size"),
            num_layers=reader.int("num_hidden_layers"),
            num_heads=reader.int("num_attention_heads"),
            num_kv_heads=reader.int("num_key_value_heads"),
            head_dim=reader.int("head_dim", 128),
            rms_norm_eps=reader.float("rms_norm_eps", above=0),
            max_position_embeddings=reader.int("max_position_embeddings"),
            rope=read_rope(reader),
            tie_word_embeddings=reader.bool("tie_word_embeddings", False),
        )
        config._check(reader)
        reader.finish()
        return config

    def _check(self, reader: ConfigReader) -> None:
        """What must hold between keys."""
        layer_types = reader.str_list("layer_types", None)
        if layer_types is not None and layer_types != ("full_attention",) * self.num_layers:
            raise reader.unsupported("layer_types", [f"{self.num_layers} times full_attention"])
        if self.num_heads % self.num_kv_heads:
            heads = f"num_attention_heads {self.num_heads}"
            raise reader.error(f"{heads} is no multiple of num_key_value_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise reader.error(f"head_dim is {self.head_dim}; rotary embedding needs an even number")

    @property
    def max_context(self) -> int:
        """Longest sequence, with rope scaling."""
        return self.rope.max_context(self.max_position_embeddings)
