"""The traced decode step: its operations, what they move, and how repeated layers fold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelFamily
from pegainfer_core.step_graph import Operation, StepGraph, fold, trace_decode_step
from pegainfer_llama.family import LlamaFamily
from pegainfer_llama.testing import tiny_config as tiny_llama
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config as tiny_qwen3

FAMILIES = [(Qwen3Family(), tiny_qwen3), (LlamaFamily(), tiny_llama)]
CACHE_SHAPES = {
    "qwen3": (tiny_qwen3()["num_key_value_heads"], tiny_qwen3()["head_dim"]),
    "llama": (tiny_llama()["num_key_value_heads"], tiny_llama()["hidden_size"] // tiny_llama()["num_attention_heads"]),
}
ROWS, CONTEXT = 3, 40


def trace(family: ModelFamily, config: dict[str, Any], rows: int = ROWS, context: int = CONTEXT) -> StepGraph:
    plan = family.plan(config, EngineConfig(model="x"), family.options())
    return trace_decode_step(family, plan, "bfloat16", rows=rows, context=context)


@pytest.fixture(scope="module", params=FAMILIES, ids=["qwen3", "llama"])
def graph(request: pytest.FixtureRequest) -> StepGraph:
    family, config = request.param
    return trace(family, config())


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=["qwen3", "llama"])
def test_every_parameter_is_read_once_and_whole(family: ModelFamily, config: Any) -> None:
    hf_config = config(tie_word_embeddings=False)
    graph = trace(family, hf_config)
    plan = family.plan(hf_config, EngineConfig(model="x"), family.options())
    read = [tensor for operation in graph.operations for tensor in operation.reads if tensor.name.endswith("weight")]
    assert sorted(tensor.name for tensor in read) == sorted(rule.parameter for rule in plan.weight_rules)
    sizes = {rule.parameter: 2 * rule.num_values for rule in plan.weight_rules}
    sizes["embed_tokens.weight"] = 2 * ROWS * plan.hidden_size  # only the rows of the step
    assert {tensor.name: tensor.num_bytes for tensor in read} == sizes


def test_the_cache_is_written_and_read_once_a_layer(graph: StepGraph) -> None:
    layers = {operation.layer for operation in graph.operations} - {None}
    kv_heads, head_dim = CACHE_SHAPES[graph.family]
    read = [
        tensor
        for operation in graph.operations
        for tensor in operation.reads
        if "attention" in operation.torch_ops and tensor.num_bytes == ROWS * CONTEXT * kv_heads * head_dim * 2
    ]
    assert len(read) == 2 * len(layers), "keys and values"
    stored = [tensor for operation in graph.operations for tensor in operation.writes if len(tensor.shape) == 3]
    pages = [tensor for tensor in stored if tensor.shape[0] > ROWS]
    assert len(pages) == 2 * len(layers)
    assert all(tensor.num_bytes == ROWS * kv_heads * head_dim * 2 for tensor in pages)


def test_traffic_grows_with_the_context_by_the_cache_alone() -> None:
    short = trace(Qwen3Family(), tiny_qwen3(), context=100)
    long = trace(Qwen3Family(), tiny_qwen3(), context=1100)
    assert long.weight_bytes == short.weight_bytes
    assert long.num_bytes - short.num_bytes == 1000 * ROWS * 4 * 2 * (2 * 32) * 2  # layers, keys and values


def test_results_flow_from_the_embedding_to_the_ids(graph: StepGraph) -> None:
    first, last = graph.operations[0], graph.operations[-1]
    assert (first.place, first.sources) == ("embed_tokens", [])
    assert last.name == "greedy" and [(t.shape, t.dtype) for t in last.writes] == [((ROWS,), "int64")]
    assert all(operation.sources for operation in graph.operations[1:]), "nothing is computed from nothing"
    assert all(source < operation.index for operation in graph.operations for source in operation.sources)
    used = {source for operation in graph.operations for source in operation.sources}
    assert used == set(range(len(graph.operations) - 1)), "nothing is computed for nothing"


def test_layers_fold_into_one_part(graph: StepGraph) -> None:
    layers = {operation.layer for operation in graph.operations} - {None}
    assert [(part.count, part.num_layers) for part in graph.parts] == [(1, 0), (len(layers), 1), (1, 0)]
    assert sum(part.num_bytes for part in graph.parts) == graph.num_bytes
    assert sum(part.count * len(part.operations) for part in graph.parts) == len(graph.operations)


def operation(index: int, name: str, layer: int | None) -> Operation:
    place = "head" if layer is None else f"layers.{layer}.part"
    return Operation(
        index=index, name=name, place=place, layer=layer, reads=[], writes=[], torch_ops=[name], sources=[]
    )


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ("aaaa", [(4, "a")]),
        ("aaab", [(3, "a"), (1, "b")]),
        ("aaabaaabaaab", [(3, "aaab")]),
        ("baaaa", [(1, "b"), (4, "a")]),
        ("abcd", [(1, "a"), (1, "b"), (1, "c"), (1, "d")]),
        ("ababab", [(3, "ab")]),
    ],
)
def test_folding(layers: str, parts: list[tuple[int, str]]) -> None:
    operations = [operation(index, name, index) for index, name in enumerate(layers)]
    found = [(part.count, "".join(operation.name for operation in part.operations)) for part in fold(operations)]
    assert found == parts


def test_layers_that_differ_in_a_shape_do_not_fold() -> None:
    graph = trace(Qwen3Family(), tiny_qwen3(num_hidden_layers=2))
    inner = [item for item in graph.operations if item.layer is not None]
    changed = dataclasses.replace(inner[-1], writes=[dataclasses.replace(inner[-1].writes[0], shape=(1, 2))])
    assert [part.count for part in fold(inner)] == [2]
    assert [part.count for part in fold([*inner[:-1], changed])] == [1, 1]
