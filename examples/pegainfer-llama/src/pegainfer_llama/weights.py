"""Which checkpoint tensors make up which parameter: published names on one side, stacked parameters on the other."""

from __future__ import annotations

from collections.abc import Iterator

from pegainfer_core.family import TensorSpec, WeightRule

from pegainfer_llama.config import LlamaConfig


def weight_rules(config: LlamaConfig) -> tuple[WeightRule, ...]:
    """Every parameter of `LlamaModel`, in the order of the published files."""
    return tuple(_rules(config))


def _rules(config: LlamaConfig) -> Iterator[WeightRule]:
    embedding_shape = (config.vocab_size, config.hidden_size)
    yield _rule("embed_tokens.weight", ("model.embed_tokens.weight", embedding_shape))
    for layer in range(config.num_layers):
        yield from _block_rules(config, layer)
    yield _rule("norm.weight", ("model.norm.weight", (config.hidden_size,)))
    yield _rule(
        "lm_head.weight",
        ("lm_head.weight", embedding_shape),
        tied_to="embed_tokens.weight" if config.tie_word_embeddings else None,
    )


def _block_rules(config: LlamaConfig, layer: int) -> Iterator[WeightRule]:
    hidden, inter = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    yield _rule(f"{ours}.attention.norm.weight", (f"{theirs}.input_layernorm.weight", (hidden,)))
    yield _rule(
        f"{ours}.attention.qkv_proj.weight",
        (f"{theirs}.self_attn.q_proj.weight", (query, hidden)),
        (f"{theirs}.self_attn.k_proj.weight", (key_value, hidden)),
        (f"{theirs}.self_attn.v_proj.weight", (key_value, hidden)),
    )
    yield _rule(f"{ours}.attention.o_proj.weight", (f"{theirs}.self_attn.o_proj.weight", (hidden, query)))
    yield _rule(f"{ours}.mlp.norm.weight", (f"{theirs}.post_attention_layernorm.weight", (hidden,)))
    yield _rule(
        f"{ours}.mlp.gate_up_proj.weight",
        (f"{theirs}.mlp.gate_proj.weight", (inter, hidden)),
        (f"{theirs}.mlp.up_proj.weight", (inter, hidden)),
    )
    yield _rule(f"{ours}.mlp.down_proj.weight", (f"{theirs}.mlp.down_proj.weight", (hidden, inter)))


def _rule(parameter: str, *sources: tuple[str, tuple[int, ...]], tied_to: str | None = None) -> WeightRule:
    specs = tuple(TensorSpec(name=name, shape=shape) for name, shape in sources)
    return WeightRule(parameter=parameter, sources=specs, tied_to=tied_to)
