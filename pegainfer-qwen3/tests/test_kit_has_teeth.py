"""The conformance kit fails families that are wrong: each mistake below must trip the check that is there for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import PluginError
from pegainfer_core.family import ModelPlan
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops.norm import RMSNorm
from pegainfer_core.testing.conformance import FamilyConformance
from pegainfer_core.testing.paged_model import PagedModel
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.model import Block, Qwen3Model
from pegainfer_qwen3.testing import tiny_config
from torch import Tensor, nn


class BrokenFamily(Qwen3Family):
    """Qwen3 with one mistake in its plan or in its module."""

    def __init__(
        self,
        break_plan: Callable[[ModelPlan], ModelPlan] = lambda plan: plan,
        break_model: Callable[[Qwen3Model], Model] = lambda model: model,
    ) -> None:
        self.break_plan = break_plan
        self.break_model = break_model

    def plan(self, hf_config: Mapping[str, Any], engine_config: EngineConfig, options: Any) -> ModelPlan:
        return self.break_plan(super().plan(hf_config, engine_config, options))

    def build(self, plan: ModelPlan, context: BuildContext) -> Model:
        model = super().build(plan, context)
        assert isinstance(model, Qwen3Model)
        return self.break_model(model)


class Kit(FamilyConformance):
    """The kit, to be called by hand."""

    family = Qwen3Family()
    plugin = "pegainfer_qwen3.plugin"
    configs = {"tiny": tiny_config(num_hidden_layers=2)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "sound", Qwen3Family(), Kit.first_config())


def kit_of(family: Qwen3Family) -> Kit:
    kit = Kit()
    kit.family = family  # type: ignore[misc]
    return kit


def assert_logits_differ(family: Qwen3Family, checkpoint: Path) -> None:
    """The comparison with the reference is what fails."""
    kit, prompt = kit_of(family), Kit().prompt()
    (expected_TV,) = kit.reference(checkpoint, [prompt])
    kit.assert_same(PagedModel(Qwen3Family(), checkpoint).logits(prompt), expected_TV)
    with pytest.raises(AssertionError):
        kit.assert_same(PagedModel(family, checkpoint).logits(prompt), expected_TV)


# mistakes in one forward pass


def without_the_last_mlp(model: Qwen3Model) -> Model:
    last = model.layers[-1]
    assert isinstance(last, Block)
    last.mlp.forward = nn.Identity().forward  # type: ignore[assignment]
    return model


def with_other_epsilon(model: Qwen3Model) -> Model:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-3
    return model


def with_rope_half_a_position_off(model: Qwen3Model) -> Model:
    model.rotary.cos_CN = (model.rotary.cos_CN.acos() + 0.01).cos()
    return model


@pytest.mark.parametrize("mistake", [without_the_last_mlp, with_other_epsilon, with_rope_half_a_position_off])
def test_wrong_numbers(mistake: Callable[[Qwen3Model], Model], checkpoint: Path) -> None:
    assert_logits_differ(BrokenFamily(break_model=mistake), checkpoint)


def test_wrong_order_of_stacked_weights(checkpoint: Path) -> None:
    def swap_gate_and_up(plan: ModelPlan) -> ModelPlan:
        rules = tuple(
            dataclasses.replace(rule, sources=rule.sources[::-1]) if "gate_up" in rule.parameter else rule
            for rule in plan.weight_rules
        )
        return dataclasses.replace(plan, weight_rules=rules)

    assert_logits_differ(BrokenFamily(break_plan=swap_gate_and_up), checkpoint)


# mistakes that only show between steps or between rows


class PositionsFromTheChunk(Qwen3Model):
    """Positions count from the start of the chunk."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        starts_R = batch.attention.metadata.query_start_R1[:-1].long()
        lengths_R = batch.attention.metadata.query_start_R1.diff().long()
        first_T = batch.positions_T[starts_R].repeat_interleave(lengths_R)
        return super().forward(dataclasses.replace(batch, positions_T=batch.positions_T - first_T))


class LooksAtOtherRows(Qwen3Model):
    """Adds a little of the whole batch to every token."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden_TE = super().forward(batch)
        last_T = batch.attention.metadata.query_start_R1[1:].long() - 1
        return hidden_TE + 0.01 * (hidden_TE[last_T].sum(0) - hidden_TE[last_T[-1]])


def as_class(kind: type[Qwen3Model]) -> Callable[[Qwen3Model], Model]:
    def change(model: Qwen3Model) -> Model:
        model.__class__ = kind
        return model

    return change


def test_positions_that_start_over_in_each_chunk(checkpoint: Path) -> None:
    kit = kit_of(BrokenFamily(break_model=as_class(PositionsFromTheChunk)))
    model = PagedModel(kit.family, checkpoint)
    for extra in (None, 0, 1):
        with pytest.raises(AssertionError):
            kit.test_chunked_prefill_equals_whole(extra, model)
    with pytest.raises(AssertionError):
        kit.test_decode_equals_prefill_of_the_longer_prompt(model)


def test_rows_that_see_each_other(checkpoint: Path) -> None:
    kit = kit_of(BrokenFamily(break_model=as_class(LooksAtOtherRows)))
    model = PagedModel(kit.family, checkpoint)
    kit.test_chunked_prefill_equals_whole(1, model)
    with pytest.raises(AssertionError):
        kit.test_batch_equals_single(model)


# mistakes in the plan


def test_a_tensor_without_a_rule(checkpoint: Path) -> None:
    broken = BrokenFamily(break_plan=lambda plan: dataclasses.replace(plan, weight_rules=plan.weight_rules[:-2]))
    with pytest.raises(PluginError, match="no rule for"):
        PagedModel(broken, checkpoint)


def test_a_plan_that_skips_everything(tmp_path: Path) -> None:
    kit = kit_of(BrokenFamily(break_plan=lambda plan: dataclasses.replace(plan, skipped_tensors=(r".*",))))
    with pytest.raises(pytest.fail.Exception):
        kit.test_no_tensor_is_ignored(tmp_path)


def test_a_layer_in_no_kv_group(checkpoint: Path) -> None:
    def forget_a_layer(plan: ModelPlan) -> ModelPlan:
        (group,) = plan.kv_groups
        return dataclasses.replace(plan, kv_groups=(dataclasses.replace(group, layers=group.layers[1:]),))

    with pytest.raises(AssertionError):
        kit_of(BrokenFamily(break_plan=forget_a_layer)).test_kv_groups_cover_each_layer_once(checkpoint)


def test_a_family_that_claims_everything() -> None:
    class Greedy(Qwen3Family):
        def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
            return None

    with pytest.raises(AssertionError, match="not this family's"):
        kit_of(Greedy()).test_declines_foreign_configs_with_a_reason()


def test_a_family_that_reads_config_loosely() -> None:
    class Loose(Qwen3Family):
        def plan(self, hf_config: Mapping[str, Any], engine_config: EngineConfig, options: Any) -> ModelPlan:
            known = {key: value for key, value in hf_config.items() if key in tiny_config()}
            return super().plan(known, EngineConfig(model="model"), options)

    with pytest.raises(pytest.fail.Exception):
        kit_of(Loose()).test_refuses_an_unknown_config_key_unless_told_to_ignore_it()


def test_an_option_without_help() -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        depth: int = 1

    class Undocumented(Qwen3Family):
        options = Options

    with pytest.raises(AssertionError, match="depth has no help"):
        kit_of(Undocumented()).test_options_are_typed_defaulted_and_documented()


def test_nan_is_never_the_same() -> None:
    logits_TV = torch.randn(4, 10)
    with pytest.raises(AssertionError):
        Kit().assert_same(torch.full_like(logits_TV, float("nan")), logits_TV)
