"""The arithmetic of `pegainfer inspect`, on a plan small enough to count by hand."""

from __future__ import annotations

import dataclasses

import pytest
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import KVGroup, ModelPlan, StateTensor, TensorSpec, WeightRule
from pegainfer_core.kv.budget import CPU_KV_CACHE_BYTES
from pegainfer_server.footprint import footprint, part_name, readable_bytes


def rule(parameter: str, *shape: int, tied_to: str | None = None) -> WeightRule:
    return WeightRule(parameter=parameter, sources=(TensorSpec(name=f"x.{parameter}", shape=shape),), tied_to=tied_to)


PLAN = ModelPlan(
    family="f",
    config=None,
    dtype="bfloat16",
    vocab_size=10,
    hidden_size=4,
    num_layers=3,
    max_context=100,
    eos_token_ids=frozenset(),
    kv_groups=(
        KVGroup(kind="full", layers=(0, 2), num_kv_heads=2, head_dim=8),
        KVGroup(kind="sliding", layers=(1,), num_kv_heads=1, head_dim=4, window=16),
    ),
    weight_rules=(
        rule("embed.weight", 10, 4),
        rule("layers.0.mlp.up.weight", 8, 4),
        rule("layers.0.mlp.down.weight", 4, 8),
        rule("layers.1.mlp.up.weight", 8, 4),
        rule("head.weight", 10, 4, tied_to="embed.weight"),
    ),
)
PER_TOKEN_VALUES = 2 * (2 * 2 * 8) + 2 * 1 * 4


@pytest.mark.parametrize(
    ("present", "parts"),
    [
        (None, {"embed": 40, "layers.mlp": 96}),
        ({"x.embed.weight"}, {"embed": 40, "layers.mlp": 96}),
        ({"x.embed.weight", "x.head.weight"}, {"embed": 40, "layers.mlp": 96, "head": 40}),
    ],
)
def test_weights_by_part_and_the_file_decides_about_ties(present: set[str] | None, parts: dict[str, int]) -> None:
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        result = footprint(
            PLAN,
            "cuda",
            dtype,
            config=EngineConfig(model="m"),
            present=present,
        )
        assert {part.name: part.values for part in result.parts} == parts
        assert result.weight_bytes == width * sum(parts.values())
        assert result.kv_bytes_per_token == width * PER_TOKEN_VALUES


@pytest.mark.parametrize(
    ("kv_pages", "max_model_len", "pages", "longest"),
    [(5, None, 4, 64), (50, None, 49, 100), (50, 20, 49, 20), (0, None, 0, 0)],
)
def test_pages_and_the_longest_request(kv_pages: int, max_model_len: int | None, pages: int, longest: int) -> None:
    result = footprint(
        PLAN,
        "cpu",
        "float32",
        config=EngineConfig(
            model="m", kv_cache_memory=kv_pages * 16 * 4 * PER_TOKEN_VALUES or 1, max_model_len=max_model_len
        ),
        present=None,
    )
    assert (result.pages, result.longest_request) == (pages, longest)


def test_recurrent_states_take_their_share_before_pages_do() -> None:
    state = (StateTensor(name="conv", shape=(64, 3)), StateTensor(name="recurrent", shape=(2, 512), dtype="float32"))
    groups = (PLAN.kv_groups[0], KVGroup(kind="state", layers=(1,), state=state))
    plan = dataclasses.replace(PLAN, max_context=10**6, kv_groups=groups)
    per_page = 16 * 4 * 2 * (2 * 2 * 8)
    for config, slots in (
        (EngineConfig(model="m", max_running_requests=7, state_snapshot_memory=5 * 4864 + 100), 7 + 1 + 5),
        (EngineConfig(model="m", max_running_requests=7, prefix_cache=False), 7 + 1),
        (EngineConfig(model="m"), 32 + 1 + 4 * 32),
        (EngineConfig(model="m", kv_cache_memory=80 * 4864), 29 + 1 + 10),
    ):
        result = footprint(plan, "cpu", "float32", config=config, present=None)
        assert result.state_bytes_per_request == 4 * 64 * 3 + 4 * 2 * 512 == 4864
        assert result.state_bytes == slots * 4864
        memory = config.kv_cache_memory or CPU_KV_CACHE_BYTES
        assert result.pages == (memory - slots * 4864) // per_page - 1
    assert footprint(plan, "cuda", "bfloat16", config=EngineConfig(model="m"), present=None).state_bytes is None


def test_names_of_parts() -> None:
    assert part_name("layers.12.attention.qkv_proj.weight") == "layers.attention"
    assert part_name("norm.weight") == "norm"
    assert part_name("vision.blocks.3.mlp.0.weight") == "vision.blocks"


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.50 KiB"), (2**20, "1.00 MiB"), (5 * 2**29, "2.50 GiB")]
)
def test_readable_bytes(count: int, text: str) -> None:
    assert readable_bytes(count) == text
