"""Loading is strict both ways: each kind of wrong file or wrong rule is an error that names what is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from pegainfer_core.errors import CheckpointError, PluginError
from pegainfer_core.family import KVGroup, ModelPlan, TensorSpec, WeightRule
from pegainfer_core.ops.linear import Embedding, Linear
from pegainfer_core.testing import corrupt
from pegainfer_core.weights import load_weights
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CPU = torch.device("cpu")
SHAPES = {"embed": (10, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "head": (10, 4)}


class Module(nn.Module):
    """A stack of three, an embedding, and a head that may be tied to it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = Embedding(10, 4, dtype)
        self.part = nn.ModuleDict({"qkv": Linear(4, 8, dtype)})
        self.head = Linear(4, 10, dtype)


def rule(parameter: str, *names: str, tied_to: str | None = None) -> WeightRule:
    sources = tuple(TensorSpec(name=name, shape=SHAPES[name]) for name in names)
    return WeightRule(parameter=parameter, sources=sources, tied_to=tied_to)


RULES = (
    rule("head.weight", "head", tied_to="embed.weight"),
    rule("part.qkv.weight", "q", "k", "v"),
    rule("embed.weight", "embed"),
)


def plan_of(*rules: WeightRule, skipped: tuple[str, ...] = ()) -> ModelPlan:
    return ModelPlan(
        family="toy",
        config=None,
        dtype="float32",
        vocab_size=10,
        hidden_size=4,
        num_layers=1,
        max_context=8,
        eos_token_ids=frozenset(),
        kv_groups=(KVGroup(kind="full", layers=(0,), num_kv_heads=1, head_dim=4),),
        weight_rules=rules or RULES,
        skipped_tensors=skipped,
    )


UNTIED = plan_of(rule("head.weight", "head"), *RULES[1:])


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_shards(tmp_path, {"a.safetensors": ["embed", "q"], "b.safetensors": ["k", "v", "head"]})
    return tmp_path


def write_shards(path: Path, shards: dict[str, list[str]]) -> None:
    values = tensors()
    for file, names in shards.items():
        save_file({name: values[name] for name in names}, path / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(path: Path, plan: ModelPlan | None = None, dtype: torch.dtype = torch.float32) -> Module:
    module = Module(dtype)
    load_weights(module, plan or plan_of(), path, CPU, dtype)
    return module


def assert_loaded(module: Module, dtype: torch.dtype = torch.float32) -> None:
    values = tensors()
    expected = {
        "embed.weight": values["embed"],
        "part.qkv.weight": torch.cat([values["q"], values["k"], values["v"]]),
        "head.weight": values["head"],
    }
    for name, value in expected.items():
        found = module.get_parameter(name)
        assert found.dtype is dtype
        assert not found.requires_grad
        assert torch.equal(found, value.to(dtype)), name


# what works


def test_single_file(single: Path) -> None:
    assert_loaded(load(single))


def test_shards(sharded: Path) -> None:
    assert_loaded(load(sharded))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_cast_once(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    save_file(tensors(stored), tmp_path / "model.safetensors")
    module = load(tmp_path, dtype=wanted)
    assert torch.equal(module.embed.weight, tensors(stored)["embed"].to(wanted))
    assert module.head.weight.dtype is wanted


def test_a_family_may_keep_a_parameter_in_float32(single: Path) -> None:
    module = Module(torch.bfloat16)
    module.embed = Embedding(10, 4, torch.float32)
    load_weights(module, UNTIED, single, CPU, torch.bfloat16)
    assert torch.equal(module.embed.weight, tensors()["embed"])
    assert module.head.weight.dtype is torch.bfloat16


def test_rows_in_another_order_and_an_offset(single: Path) -> None:
    pieces = TensorSpec(name="q", shape=SHAPES["q"], rows=((3, 1), (0, 2), (2, 1)))
    stacked = dataclasses.replace(rule("part.qkv.weight", "q", "k", "v"), offset=1.0)
    stacked = dataclasses.replace(stacked, sources=(pieces, *stacked.sources[1:]))
    loaded = load(single, plan_of(RULES[0], stacked, RULES[2])).get_parameter("part.qkv.weight")
    stored = tensors()
    expected = torch.cat((stored["q"][[3, 0, 1, 2]], stored["k"], stored["v"])) + 1
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize("rows", [((0, 3),), ((0, 4), (0, 1)), ((0, 5),), ((1, 4),)])
def test_pieces_have_each_row_once(rows: tuple[tuple[int, int], ...], single: Path) -> None:
    stacked = rule("part.qkv.weight", "q", "k", "v")
    pieces = dataclasses.replace(stacked.sources[0], rows=rows)
    stacked = dataclasses.replace(stacked, sources=(pieces, *stacked.sources[1:]))
    with pytest.raises(PluginError, match="the pieces of q do not have each of its rows once"):
        load(single, plan_of(RULES[0], stacked, RULES[2]))


def test_what_may_be_tied_is_loaded_as_it_is(single: Path) -> None:
    with pytest.raises(PluginError, match=r"head\.weight may be tied, so its rule takes neither pieces nor an offset"):
        load(single, plan_of(dataclasses.replace(RULES[0], offset=1.0), *RULES[1:]))


def test_returns_the_bytes_and_tells_progress(single: Path) -> None:
    calls: list[tuple[int, int]] = []
    module = Module(torch.bfloat16)
    num_bytes = load_weights(module, UNTIED, single, CPU, torch.bfloat16, lambda *call: calls.append(call))
    assert num_bytes == 2 * (40 + 32 + 40)
    stored = 4 * (40 + 32 + 40)
    assert calls[-1] == (stored, stored)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls}), "it only grows"
    assert {total for _, total in calls} == {stored}


def test_the_result_does_not_depend_on_the_file(single: Path) -> None:
    module = load(single)
    (single / "model.safetensors").unlink()
    assert_loaded(module)


# tied parameters: the file decides


def test_tied_and_left_out_shares_memory(single: Path) -> None:
    corrupt.drop_tensor(single, "head")
    module = Module()
    assert load_weights(module, plan_of(), single, CPU, torch.float32) == 4 * (40 + 32)
    assert module.head.weight is module.embed.weight


def test_tied_and_stored_equal_shares_memory(single: Path) -> None:
    corrupt.edit_file_of(single, "head", lambda values: values.update(head=values["embed"].clone()))
    module = load(single)
    assert module.head.weight is module.embed.weight


def test_tied_but_stored_different_is_used(single: Path) -> None:
    assert_loaded(load(single))


def test_tied_but_one_bit_different_is_used(single: Path) -> None:
    def edit(values: dict[str, Tensor]) -> None:
        values["embed"][3, 1] = 0.0
        values["head"] = values["embed"].clone()
        values["head"][3, 1] = -0.0

    corrupt.edit_file_of(single, "head", edit)
    module = load(single)
    assert module.head.weight is not module.embed.weight
    assert torch.signbit(module.head.weight[3, 1])


def test_tied_progress_reaches_the_end(single: Path) -> None:
    corrupt.edit_file_of(single, "head", lambda values: values.update(head=values["embed"].clone()))
    calls: list[tuple[int, int]] = []
    load_weights(Module(), plan_of(), single, CPU, torch.float32, lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]


def test_untied_and_left_out_is_missing(single: Path) -> None:
    corrupt.drop_tensor(single, "head")
    with pytest.raises(CheckpointError, match=r"lacks head \[10, 4\]"):
        load(single, UNTIED)


# wrong files


@pytest.mark.parametrize("name", ["embed", "q", "k", "v"])
def test_missing_tensor(single: Path, name: str) -> None:
    corrupt.drop_tensor(single, name)
    with pytest.raises(CheckpointError, match=rf"lacks {name} {re.escape(str(list(SHAPES[name])))}"):
        load(single)


def test_many_missing_tensors_are_counted(single: Path) -> None:
    save_file({"embed": tensors()["embed"]}, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks head .*, k .*, q .* and 1 more$"):
        load(single, UNTIED)


def test_extra_tensor(single: Path) -> None:
    corrupt.add_tensor(single, "adapter.weight", beside="q")
    with pytest.raises(CheckpointError, match=r"has adapter\.weight \(model\.safetensors\), which toy does not know"):
        load(single)


def test_a_renamed_tensor_is_named_both_ways(single: Path) -> None:
    corrupt.edit_file_of(single, "q", lambda values: values.update(query=values.pop("q")))
    with pytest.raises(CheckpointError, match=r"lacks q \[4, 4\] and has query \(model\.safetensors\)"):
        load(single)


def test_skipped_tensors_match_as_a_whole(single: Path) -> None:
    corrupt.add_tensor(single, "rotary.0", beside="q", value=torch.ones(2, dtype=torch.int8))
    assert_loaded(load(single, plan_of(skipped=(r"rotary\.\d+",))))
    with pytest.raises(CheckpointError, match=r"rotary\.0"):
        load(single, plan_of(skipped=(r"rotary",)))


@pytest.mark.parametrize("name", ["embed", "k", "head"])
def test_wrong_shape(single: Path, name: str) -> None:
    corrupt.reshape_tensor(single, name)
    rows, columns = SHAPES[name]
    expected = rf"tensor {name} has shape \[{rows + 1}, {columns}\]; config.json implies \[{rows}, {columns}\]"
    with pytest.raises(CheckpointError, match=expected):
        load(single)


def test_right_sum_but_wrong_parts(single: Path) -> None:
    corrupt.edit_file_of(single, "q", lambda values: values.update(q=torch.ones(3, 4), k=torch.ones(3, 4)))
    with pytest.raises(CheckpointError, match=r"tensor q has shape \[3, 4\]"):
        load(single)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.float64, "F64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.bool, "BOOL"),
    ],
)
def test_wrong_dtype(single: Path, dtype: torch.dtype, name: str) -> None:
    corrupt.retype_tensor(single, "k", dtype)
    with pytest.raises(CheckpointError, match=rf"tensor k has type {name}; toy supports F32, BF16, F16"):
        load(single)


def test_missing_shard(sharded: Path) -> None:
    corrupt.remove_file_of(sharded, "v")
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        load(sharded)


def test_tensor_in_the_index_but_not_in_its_file(sharded: Path) -> None:
    corrupt.drop_tensor(sharded, "v")
    with pytest.raises(CheckpointError, match=r"b\.safetensors has no tensor v"):
        load(sharded)


def test_tensor_in_a_shard_but_not_in_the_index(sharded: Path) -> None:
    corrupt.add_tensor(sharded, "stowaway", beside="v")
    with pytest.raises(CheckpointError, match=r"has stowaway \(b\.safetensors\)"):
        load(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    corrupt.add_tensor(sharded, "q", beside="v", value=torch.zeros(4, 4))
    with pytest.raises(CheckpointError, match=r"tensor q is in two files: .*a\.safetensors and .*b\.safetensors"):
        load(sharded)


@pytest.mark.parametrize("num_bytes", [1, 300, 10_000])
def test_truncated_file(sharded: Path, num_bytes: int) -> None:
    corrupt.truncate_file_of(sharded, "v", num_bytes)
    with pytest.raises(CheckpointError, match=r"b\.safetensors is no complete safetensors file"):
        load(sharded)


def test_garbage_file(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"\xff" * 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no complete safetensors file"):
        load(single)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        load(tmp_path)


# wrong rules: the plugin's bugs


def test_parameter_without_a_rule(single: Path) -> None:
    with pytest.raises(PluginError, match=r"no rule for head\.weight"):
        load(single, plan_of(*RULES[1:]))


def test_rule_without_a_parameter(single: Path) -> None:
    with pytest.raises(PluginError, match=r"no parameter for tail\.weight"):
        load(single, plan_of(*RULES[1:], dataclasses.replace(RULES[0], parameter="tail.weight")))


def test_two_rules_for_a_parameter(single: Path) -> None:
    with pytest.raises(PluginError, match=r"parameter embed\.weight has two weight rules"):
        load(single, plan_of(*RULES, dataclasses.replace(RULES[0], parameter="embed.weight")))


def test_two_rules_for_a_tensor(single: Path) -> None:
    with pytest.raises(PluginError, match=r"tensor embed has two weight rules"):
        load(single, plan_of(rule("head.weight", "embed"), *RULES[1:]))


def test_rule_of_another_shape(single: Path) -> None:
    with pytest.raises(PluginError, match=r"part\.qkv\.weight is \[8, 4\], its weight rule \[6, 4\]"):
        load(single, plan_of(RULES[0], rule("part.qkv.weight", "q", "k"), RULES[2]))


@pytest.mark.parametrize("tied_to", ["nothing.weight", "head.weight"])
def test_tied_to_what_has_no_rule_of_its_own(single: Path, tied_to: str) -> None:
    with pytest.raises(PluginError, match=rf"head\.weight is tied to {tied_to}"):
        load(single, plan_of(dataclasses.replace(RULES[0], tied_to=tied_to), *RULES[1:]))


def test_parameter_of_another_type(single: Path) -> None:
    with pytest.raises(PluginError, match=r"head\.weight is torch\.float16; it must be torch\.bfloat16"):
        load_weights(Module(torch.float16), plan_of(), single, CPU, torch.bfloat16)


def test_nothing_is_allocated_before_the_checks(single: Path) -> None:
    corrupt.retype_tensor(single, "head", torch.int8)
    module = Module()
    with pytest.raises(CheckpointError):
        load_weights(module, plan_of(), single, CPU, torch.float32)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_corrupt_helpers_leave_other_tensors_alone(single: Path) -> None:
    corrupt.retype_tensor(single, "k", torch.int8)
    found = load_file(single / "model.safetensors")
    for name, value in tensors().items():
        assert torch.equal(found[name], value) is (name != "k")
