"""What Llama reads from config.json. Every key is read strictly here, or known to have no effect, or an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.hf_config import ConfigReader, RopeConfig, read_rope


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The numbers that define one Llama model."""

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
    def from_hf(cls, hf_config: Mapping[str, Any], ignore_keys: Sequence[str] = ()) -> LlamaConfig:
        """Read config.json. Raises ConfigError naming the key, its value and what is supported."""
        reader = ConfigReader(hf_config, "llama", ignore_keys)
        if reader.has("quantization_config"):
            raise reader.error(
                "quantization_config is set; llama serves bfloat16, float16 and float32 checkpoints only"
            )
        reader.choice("hidden_act", ["silu"])
        reader.only("attention_bias", False)
        reader.only("mlp_bias", False)
        hidden_size = reader.int("hidden_size")
        num_heads = reader.int("num_attention_heads")
        num_kv_heads = reader.int("num_key_value_heads", num_heads)  # Llama 1 has no such key
        head_dim = reader.int("head_dim", None)
        if head_dim is None:
            if hidden_size % num_heads:
                raise reader.error(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
            head_dim = hidden_size // num_heads
        if head_dim % 2:
            raise reader.error(f"head_dim is {head_dim}; rotary embedding needs an even number")
        if num_heads % num_kv_heads:
            raise reader.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        config = cls(
            vocab_size=reader.int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.int("intermediate_size"),
            num_layers=reader.int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.float("rms_norm_eps", above=0),
            max_position_embeddings=reader.int("max_position_embeddings"),
            rope=read_rope(reader, default_theta=10000.0),  # Llama 2 has no rope_theta
            tie_word_embeddings=reader.bool("tie_word_embeddings", False),
        )
        reader.finish()
        return config
