"""Which checkpoint tensors make up which parameter: published names on one side, stacked parameters on the other."""

from __future__ import annotations

from collections.abc import Iterator

from pegainfer_core.family import TensorSpec, WeightRule

from pegainfer_qwen3.config import Qwen3Config


def weight_rules(config: Qwen3Config) -> tuple[WeightRule, ...]:
    """Every parameter of `Qwen3Model`, in the order of the published files."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    rules = [_rule("embed_tokens.weight", ("model.embed_tokens.weight", embedding_shape))]
    for layer in range(config.num_layers):
        rules.extend(_block_rules(config, layer))
    rules.append(_rule("norm.weight", ("model.norm.weight", (config.hidden_size,))))
    rules.append(
        WeightRule(
            parameter="lm_head.weight",
            sources=(TensorSpec(name="lm_head.weight", shape=embedding_shape),),
            tied_to="embed_tokens.weight" if config.tie_word_embeddings else None,
        )
    )
    return tuple(rules)


def _block_rules(config: Qwen3Config, layer: int) -> Iterator[WeightRule]:
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key_value = config.num_heads * head_dim, config.num_kv_heads * head_dim
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    yield _rule(f"{ours}.attention.norm.weight", (f"{theirs}.input_layernorm.weight", (hidden,)))
    yield _rule(
        f"{ours}.attention.qkv_proj.weight",
        (f"{theirs}.self_attn.q_proj.weight", (query, hidden)),
        (f"{theirs}.self_attn.k_proj.weight", (key_value, hidden)),
        (f"{theirs}.self_attn.v_proj.weight", (key_value, hidden)),
    )
    yield _rule(f"{ours}.attention.q_norm.weight", (f"{theirs}.self_attn.q_norm.weight", (head_dim,)))
    yield _rule(f"{ours}.attention.k_norm.weight", (f"{theirs}.self_attn.k_norm.weight", (head_dim,)))
    yield _rule(f"{ours}.attention.o_proj.weight", (f"{theirs}.self_attn.o_proj.weight", (hidden, query)))
    yield _rule(f"{ours}.mlp.norm.weight", (f"{theirs}.post_attention_layernorm.weight", (hidden,)))
    yield _rule(
        f"{ours}.mlp.gate_up_proj.weight",
        (f"{theirs}.mlp.gate_proj.weight", (inter, hidden)),
        (f"{theirs}.mlp.up_proj.weight", (inter, hidden)),
    )
    yield _rule(f"{ours}.mlp.down_proj.weight", (f"{theirs}.mlp.down_proj.weight", (hidden, inter)))


def _rule(parameter: str, *sources: tuple[str, tuple[int, ...]]) -> WeightRule:
    return WeightRule(parameter=parameter, sources=tuple(TensorSpec(name=name, shape=shape) for name, shape in sources))
