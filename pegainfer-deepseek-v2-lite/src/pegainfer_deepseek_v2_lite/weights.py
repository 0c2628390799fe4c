"""Which checkpoint tensors make up which parameter: published names on one side, stacked parameters on the other.

Rows that are rotated are loaded in the order of half-split rotation; published ones are in pairs. Each expert has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from pegainfer_core.family import TensorSpec, WeightRule
from pegainfer_core.hf_config import paired_rows

from pegainfer_deepseek_v2_lite.config import DeepseekV2LiteConfig

SKIPPED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""A buffer that old exports stored; it is computed from config.json."""


def weight_rules(config: DeepseekV2LiteConfig) -> tuple[WeightRule, ...]:
    """Every parameter of `DeepseekV2LiteModel`, in the order of the published files."""
    embedding = TensorSpec(name="model.embed_tokens.weight", shape=(config.vocab_size, config.hidden_size))
    rules = [_rule("embed_tokens.weight", embedding)]
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        rules.extend(_attention(config, f"{ours}.attention", theirs))
        rules.append(_norm(f"{ours}.mlp.norm", f"{theirs}.post_attention_layernorm", config.hidden_size))
        dense = layer < config.num_dense_layers
        rules.extend((_mlp if dense else _experts)(config, f"{ours}.mlp", f"{theirs}.mlp"))
    rules.append(_norm("norm", "model.norm", config.hidden_size))
    rules.append(
        WeightRule(
            parameter="lm_head.weight",
            sources=(TensorSpec(name="lm_head.weight", shape=embedding.shape),),
            tied_to="embed_tokens.weight" if config.tie_word_embeddings else None,
        )
    )
    return tuple(rules)


def _attention(config: DeepseekV2LiteConfig, ours: str, theirs: str) -> Iterator[WeightRule]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.latent_rank
    size = config.key_dim + config.rope_dim
    yield _norm(f"{ours}.norm", f"{theirs}.input_layernorm", hidden)
    theirs = f"{theirs}.self_attn"
    latents = TensorSpec(
        name=f"{theirs}.kv_a_proj_with_mqa.weight",
        shape=(rank + config.rope_dim, hidden),
        rows=paired_rows(1, rank + config.rope_dim, config.rope_dim),
    )
    queries = TensorSpec(
        name=f"{theirs}.{'q_proj' if config.query_rank is None else 'q_b_proj'}.weight",
        shape=(heads * size, config.query_rank or hidden),
        rows=paired_rows(heads, size, config.rope_dim),
    )
    if config.query_rank is None:
        yield _rule(f"{ours}.in_proj.weight", queries, latents)
    else:
        q_a_proj = TensorSpec(name=f"{theirs}.q_a_proj.weight", shape=(config.query_rank, hidden))
        yield _rule(f"{ours}.in_proj.weight", q_a_proj, latents)
        yield _norm(f"{ours}.query_norm", f"{theirs}.q_a_layernorm", config.query_rank)
        yield _rule(f"{ours}.query_proj.weight", queries)
    yield _norm(f"{ours}.latent.norm", f"{theirs}.kv_a_layernorm", rank)
    up_shape = (heads * (config.key_dim + config.value_dim), rank)
    yield _rule(f"{ours}.latent.up", TensorSpec(name=f"{theirs}.kv_b_proj.weight", shape=up_shape))
    out_shape = (hidden, heads * config.value_dim)
    yield _rule(f"{ours}.out_proj.weight", TensorSpec(name=f"{theirs}.o_proj.weight", shape=out_shape))


def _mlp(config: DeepseekV2LiteConfig, ours: str, theirs: str) -> Iterator[WeightRule]:
    gate, up, down = _swiglu(config.hidden_size, config.intermediate_size, theirs)
    yield _rule(f"{ours}.gate_up_proj.weight", gate, up)
    yield _rule(f"{ours}.down_proj.weight", down)


def _experts(config: DeepseekV2LiteConfig, ours: str, theirs: str) -> Iterator[WeightRule]:
    hidden, num_experts = config.hidden_size, config.experts.rule.num_experts
    yield _rule(f"{ours}.router.weight", TensorSpec(name=f"{theirs}.gate.weight", shape=(num_experts, hidden)))
    experts = [
        _swiglu(hidden, config.experts.intermediate_size, f"{theirs}.experts.{expert}") for expert in range(num_experts)
    ]
    yield _rule(f"{ours}.experts.gate_up", *(each for gate, up, _ in experts for each in (gate, up)))
    yield _rule(f"{ours}.experts.down", *(down for _, _, down in experts))
    gate, up, down = _swiglu(hidden, config.experts.shared_intermediate_size, f"{theirs}.shared_experts")
    yield _rule(f"{ours}.shared_gate_up_proj.weight", gate, up)
    yield _rule(f"{ours}.shared_down_proj.weight", down)


def _swiglu(hidden: int, inter: int, theirs: str) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Gate, up, down."""
    return (
        TensorSpec(name=f"{theirs}.gate_proj.weight", shape=(inter, hidden)),
        TensorSpec(name=f"{theirs}.up_proj.weight", shape=(inter, hidden)),
        TensorSpec(name=f"{theirs}.down_proj.weight", shape=(hidden, inter)),
    )


def _norm(parameter: str, name: str, size: int) -> WeightRule:
    return _rule(f"{parameter}.weight", TensorSpec(name=f"{name}.weight", shape=(size,)))


def _rule(parameter: str, *sources: TensorSpec) -> WeightRule:
    return WeightRule(parameter=parameter, sources=sources)
