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
        reader.choice("hidden_act", ["silu"])
        num_layers = reader.int("num_hidden_layers")
        num_heads = reader.int("num_attention_heads")
        config = cls(
            vocab_size=reader.int("vocab_size"),
            hidden_size=reader.int("hidden_size"),
            intermediate_size=reader.int("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=reader.int("num_key_value_heads", num_heads),
            head_dim=reader.int("head_dim", 128),
            rms_norm_eps=reader.float("rms_norm_eps", 1e-6, above=0),
            max_position_embeddings=reader.int("max_position_embeddings", 40960),
            rope=read_rope(reader, default_theta=10000.0),
            tie_word_embeddings=reader.bool("tie_word_embeddings", False),
        )
        reader.only("use_sliding_window", False)
        reader.only("attention_bias", False)
        layer_types = reader.str_list("layer_types", None)
        if layer_types is not None and len(layer_types) != num_layers:
            raise reader.error(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
        if layer_types is not None and set(layer_types) != {"full_attention"}:
            raise reader.unsupported("layer_types", ["full_attention in every layer"])
        if config.num_heads % config.num_kv_heads:
            raise reader.error(
                f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
            )
        if config.head_dim % 2:
            raise reader.error(f"head_dim is {config.head_dim}; rotary embedding needs an even number")
        reader.finish()
        return config

    @property
    def max_context(self) -> int:
        """Longest sequence, with rope scaling."""
        return self.rope.max_context(self.max_position_embeddings)
