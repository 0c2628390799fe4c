"""Which checkpoint tensors make up which parameter: published names on one side, stacked parameters on the other."""

from __future__ import annotations

from collections.abc import Iterator

from pegainfer_core.family import TensorSpec, WeightRule
from pegainfer_core.hf_config import rotary_rows

from pegainfer_qwen35.config import Qwen35Config

SKIPPED_TENSORS = (r"model\.visual\..+", r"mtp\..+")
"""The vision tower, since text alone is served, and the drafter's layer."""


def weight_rules(config: Qwen35Config) -> tuple[WeightRule, ...]:
    """Every parameter of `Qwen35Model`, in the order of the published files."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    rules = [_rule("embed_tokens.weight", (f"{config.prefix}.embed_tokens.weight", embedding_shape))]
    for layer, full in enumerate(config.full_attention):
        theirs = f"{config.prefix}.layers.{layer}"
        rules.append(_norm(f"layers.{layer}.mixer.norm", f"{theirs}.input_layernorm", config.hidden_size))
        rules.extend((_attention if full else _delta)(config, f"layers.{layer}.mixer", theirs))
        rules.extend(_mlp(config, f"layers.{layer}.mlp", theirs))
    rules.append(_norm("norm", f"{config.prefix}.norm", config.hidden_size))
    rules.append(
        WeightRule(
            parameter="lm_head.weight",
            sources=(TensorSpec(name="lm_head.weight", shape=embedding_shape),),
            tied_to="embed_tokens.weight" if config.tie_word_embeddings else None,
        )
    )
    return tuple(rules)


def _attention(config: Qwen35Config, ours: str, theirs: str) -> Iterator[WeightRule]:
    """Rows of queries and keys in the order that full rotation wants; the queries' gates, which lie between them, first."""
    hidden, size, heads, kv_heads = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    rotary_dim = config.rope.rotary_dim(size)
    gates = tuple((2 * size * head + size, size) for head in range(heads))
    one_head = rotary_rows(1, size, rotary_dim) or ((0, size),)
    queries = tuple((2 * size * head + first, count) for head in range(heads) for first, count in one_head)
    theirs = f"{theirs}.self_attn"
    q_proj = TensorSpec(name=f"{theirs}.q_proj.weight", shape=(2 * heads * size, hidden), rows=gates + queries)
    k_proj = TensorSpec(
        name=f"{theirs}.k_proj.weight",
        shape=(kv_heads * size, hidden),
        rows=rotary_rows(kv_heads, size, rotary_dim),
    )
    v_proj = TensorSpec(name=f"{theirs}.v_proj.weight", shape=(kv_heads * size, hidden))
    yield WeightRule(parameter=f"{ours}.in_proj.weight", sources=(q_proj, k_proj, v_proj))
    for norm in ("q_norm", "k_norm"):
        yield _norm(f"{ours}.{norm}", f"{theirs}.{norm}", size, rotary_rows(1, size, rotary_dim))
    yield _rule(f"{ours}.out_proj.weight", (f"{theirs}.o_proj.weight", (hidden, heads * size)))


def _delta(config: Qwen35Config, ours: str, theirs: str) -> Iterator[WeightRule]:
    hidden, delta = config.hidden_size, config.delta
    heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    theirs = f"{theirs}.linear_attn"
    yield _rule(
        f"{ours}.in_proj.weight",
        (f"{theirs}.in_proj_qkv.weight", (delta.channels, hidden)),
        (f"{theirs}.in_proj_z.weight", (values, hidden)),
        (f"{theirs}.in_proj_b.weight", (heads, hidden)),
        (f"{theirs}.in_proj_a.weight", (heads, hidden)),
    )
    yield _rule(f"{ours}.delta.conv_C1W", (f"{theirs}.conv1d.weight", (delta.channels, 1, delta.taps)))
    yield _rule(f"{ours}.delta.A_log_H", (f"{theirs}.A_log", (heads,)))
    yield _rule(f"{ours}.delta.dt_bias_H", (f"{theirs}.dt_bias", (heads,)))
    yield _rule(f"{ours}.delta.norm_V", (f"{theirs}.norm.weight", (delta.value_dim,)))
    yield _rule(f"{ours}.out_proj.weight", (f"{theirs}.out_proj.weight", (hidden, values)))


def _mlp(config: Qwen35Config, ours: str, theirs: str) -> Iterator[WeightRule]:
    hidden, inter = config.hidden_size, config.intermediate_size
    yield _norm(f"{ours}.norm", f"{theirs}.post_attention_layernorm", hidden)
    yield _rule(
        f"{ours}.gate_up_proj.weight",
        (f"{theirs}.mlp.gate_proj.weight", (inter, hidden)),
        (f"{theirs}.mlp.up_proj.weight", (inter, hidden)),
    )
    yield _rule(f"{ours}.down_proj.weight", (f"{theirs}.mlp.down_proj.weight", (hidden, inter)))


def _rule(parameter: str, *sources: tuple[str, tuple[int, ...]]) -> WeightRule:
    return WeightRule(parameter=parameter, sources=tuple(TensorSpec(name=name, shape=shape) for name, shape in sources))


def _norm(parameter: str, name: str, size: int, rows: tuple[tuple[int, int], ...] = ()) -> WeightRule:
    """Stored as the difference to 1."""
    source = TensorSpec(name=f"{name}.weight", shape=(size,), rows=rows)
    return WeightRule(parameter=f"{parameter}.weight", sources=(source,), offset=1.0)
