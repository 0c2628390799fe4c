"""The arithmetic of `pegainfer inspect`, on a plan small enough to count by hand."""

from __future__ import annotations

import pytest
from pegainfer_core import memory
from pegainfer_core.family import KVGroup, ModelPlan, TensorSpec, WeightRule
from pegainfer_server.footprint import CPU_KV_CACHE_BYTES, footprint, part_name, readable_bytes


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
            page_size=16,
            kv_bytes=None,
            max_model_len=None,
            max_running_requests=None,
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
        page_size=16,
        kv_bytes=kv_pages * 16 * 4 * PER_TOKEN_VALUES,
        max_model_len=max_model_len,
        max_running_requests=None,
        present=None,
    )
    assert (result.pages, result.longest_request) == (pages, longest)


def test_the_default_is_the_engines() -> None:
    assert CPU_KV_CACHE_BYTES == memory.CPU_KV_CACHE_BYTES


def test_names_of_parts() -> None:
    assert part_name("layers.12.attention.qkv_proj.weight") == "layers.attention"
    assert part_name("norm.weight") == "norm"
    assert part_name("vision.blocks.3.mlp.0.weight") == "vision.blocks"


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.50 KiB"), (2**20, "1.00 MiB"), (5 * 2**29, "2.50 GiB")]
)
def test_readable_bytes(count: int, text: str) -> None:
    assert readable_bytes(count) == text
