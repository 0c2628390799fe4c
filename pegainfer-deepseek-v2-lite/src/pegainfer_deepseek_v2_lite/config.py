"""What DeepSeek-V2-Lite reads from config.json: every key is read strictly here, or known to have no effect, or an error.

Queries may come through a vector of their own (q_lora_rank), and experts in groups, as in the larger models of the same architecture.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.hf_config import ConfigReader, RopeConfig, YarnScaling, read_rope, yarn_mscale
from pegainfer_core.routing import RoutingRule

LATENT_NORM_EPS = 1e-6
"""Of the norms of latent vectors: the published code and transformers build these without the config's rms_norm_eps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of experts."""

    rule: RoutingRule
    intermediate_size: int
    """Of one expert."""
    shared_intermediate_size: int
    """Of all shared experts together: they are one MLP."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2LiteConfig:
    """The numbers that define one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers."""
    num_layers: int
    num_dense_layers: int
    """The first ones; the others are mixtures of experts."""
    num_heads: int
    query_rank: int | None
    """Size of the vector that queries come from; None: they come from the hidden state."""
    latent_rank: int
    key_dim: int
    """Dimensions of a head's key that are not rotated."""
    rope_dim: int
    value_dim: int
    experts: ExpertsConfig
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], ignore_keys: Sequence[str] = ()) -> DeepseekV2LiteConfig:
        """Read config.json. Raises ConfigError naming the key, its value and what is supported."""
        reader = ConfigReader(hf_config, "deepseek-v2-lite", ignore_keys)
        if reader.has("quantization_config"):
            raise reader.error(
                "quantization_config is set; deepseek-v2-lite serves bfloat16, float16 and float32 checkpoints only"
            )
        reader.choice("hidden_act", ["silu"])
        reader.only("attention_bias", False)
        reader.only("mlp_bias", False)
        reader.only("moe_layer_freq", 1)
        reader.no_effect(
            "aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits"
        )  # of training and of its layout
        config = cls(
            vocab_size=reader.int("vocab_size"),
            hidden_size=reader.int("hidden_size"),
            intermediate_size=reader.int("intermediate_size"),
            num_layers=reader.int("num_hidden_layers"),
            num_dense_layers=reader.int("first_k_dense_replace", 0, minimum=0),
            num_heads=reader.int("num_attention_heads"),
            query_rank=reader.int("q_lora_rank", None),
            latent_rank=reader.int("kv_lora_rank"),
            key_dim=reader.int("qk_nope_head_dim"),
            rope_dim=reader.int("qk_rope_head_dim"),
            value_dim=reader.int("v_head_dim"),
            experts=_experts(reader),
            rms_norm_eps=reader.float("rms_norm_eps", above=0),
            max_position_embeddings=reader.int("max_position_embeddings"),
            rope=read_rope(reader, supported=("default", "yarn")),
            tie_word_embeddings=reader.bool("tie_word_embeddings", False),
        )
        config._check(reader)
        reader.finish()
        return config

    def _check(self, reader: ConfigReader) -> None:
        """What must hold between keys."""
        reader.only("num_key_value_heads", self.num_heads)
        reader.only("head_dim", self.rope_dim)  # transformers writes down what is rotated
        reader.only("qk_head_dim", self.key_dim + self.rope_dim)
        if self.rope_dim % 2:
            raise reader.error(f"qk_rope_head_dim is {self.rope_dim}; rotary embedding needs an even number")

    @property
    def max_context(self) -> int:
        """Longest sequence, with rope scaling."""
        return self.rope.max_context(self.max_position_embeddings)

    @property
    def softmax_scale(self) -> float:
        """Of scores: one over the root of a key's size, and YaRN's factor, once for the query and once for the key."""
        scaling = self.rope.scaling
        factor = 1.0
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            factor = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return factor * factor / math.sqrt(self.key_dim + self.rope_dim)


def _experts(reader: ConfigReader) -> ExpertsConfig:
    reader.only("scoring_func", "softmax")
    reader.only("norm_topk_prob", False)
    grouped = reader.choice("topk_method", ["greedy", "group_limited_greedy"], "greedy") != "greedy"
    groups, chosen_groups = reader.int("n_group", 1), reader.int("topk_group", 1)
    rule = RoutingRule(
        num_experts=reader.int("n_routed_experts"),
        num_chosen=reader.int("num_experts_per_tok"),
        scoring="softmax",
        num_groups=groups if grouped else 1,
        num_chosen_groups=chosen_groups if grouped else 1,
        scale=reader.float("routed_scaling_factor", 1.0, above=0),
    )
    problem = rule.problem()
    if problem is not None:
        raise reader.error(f"n_routed_experts, n_group, topk_group and num_experts_per_tok do not fit: {problem}")
    intermediate_size = reader.int("moe_intermediate_size")
    return ExpertsConfig(
        rule=rule,
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size * reader.int("n_shared_experts"),
    )
