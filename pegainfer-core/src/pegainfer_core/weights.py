"""Fills a model's parameters from safetensors: each tensor read once, cast and copied straight to its place.

Owns the application of `ModelPlan.weight_rules`. Knows no family's names. Invariant: strict both ways. Every tensor a
rule names exists with the declared shape and a supported type, and every tensor of the checkpoint is named by a rule or
by `ModelPlan.skipped_tensors`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pegainfer_core.errors import CheckpointError, PluginError
from pegainfer_core.family import ModelPlan, WeightRule
from pegainfer_core.stored_tensors import SUPPORTED_DTYPES, StoredTensor, equal_bytes, stored_tensors
from pegainfer_core.weight_transfer import Move, transfer

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), counted as the checkpoint stores them."""


def load_weights(
    model: nn.Module,
    plan: ModelPlan,
    checkpoint_path: Path,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress | None = None,
) -> int:
    """Replace every meta parameter of `model` by its values on `device`; returns the bytes they take there.

    Parameters keep the type that the family gave them: `dtype`, or float32 where it wants more. Raises CheckpointError
    for whatever is wrong with the files, naming tensor, file, found and expected, and PluginError if the family's rules
    and its module do not agree.
    """
    rules = {rule.parameter: rule for rule in plan.weight_rules}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_rules(plan, rules, parameters, dtype)
    stored = check_tensors(plan, checkpoint_path)
    sources = {rule.parameter: _sources(rule, stored) for rule in plan.weight_rules}
    progress = _Progress(on_progress, sum(tensor.num_bytes for parts in sources.values() for tensor in parts))
    moves: list[Move] = []
    # A tied parameter comes after the one it may share.
    for rule in sorted(plan.weight_rules, key=lambda rule: rule.tied_to is not None):
        name, parts = rule.parameter, sources[rule.parameter]
        if rule.tied_to is not None and _shares(parts, sources[rule.tied_to]):
            value = model.get_parameter(rule.tied_to)
            progress.add(sum(tensor.num_bytes for tensor in parts))
        else:
            like = parameters[name]
            value = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=device), requires_grad=False)
            moves.extend(_stack(rule, parts, value.data))
        _set_parameter(model, name, value)
    transfer(moves, device, progress.add)
    for rule in plan.weight_rules:
        if rule.offset:
            model.get_parameter(rule.parameter).data.add_(rule.offset)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def check_tensors(plan: ModelPlan, checkpoint_path: Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by name, found as the plan wants them; reads headers only. Raises CheckpointError."""
    stored = stored_tensors(checkpoint_path)
    _check_names(plan, stored, checkpoint_path)
    for rule in plan.weight_rules:
        _check_sources(plan, rule, stored)
    return stored


def _sources(rule: WeightRule, stored: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """The rule's tensors in its order; none for a tied parameter that the checkpoint leaves out."""
    return [stored[source.name] for source in rule.sources if source.name in stored]


# checks


def _check_rules(
    plan: ModelPlan, rules: Mapping[str, WeightRule], parameters: Mapping[str, nn.Parameter], dtype: torch.dtype
) -> None:
    """The family's own two tables must agree; a difference is a bug of the plugin, not of the checkpoint."""
    for kind, names in (
        ("parameter", [rule.parameter for rule in plan.weight_rules]),
        ("tensor", [source.name for rule in plan.weight_rules for source in rule.sources]),
    ):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise PluginError(f"{plan.family}: {kind} {repeated[0]} has two weight rules")
    without_rule, without_parameter = parameters.keys() - rules.keys(), rules.keys() - parameters.keys()
    if without_rule or without_parameter:
        raise PluginError(
            f"{plan.family}: weight rules and parameters differ: no rule for {_listed(without_rule)}, "
            f"no parameter for {_listed(without_parameter)}"
        )
    for name, rule in rules.items():
        parameter = parameters[name]
        shape = _stacked_shape(plan, rule)
        if shape != tuple(parameter.shape):
            raise PluginError(f"{plan.family}: {name} is {list(parameter.shape)}, its weight rule {list(shape)}")
        if parameter.dtype not in (dtype, torch.float32):
            raise PluginError(f"{plan.family}: {name} is {parameter.dtype}; it must be {dtype} or torch.float32")
        if rule.tied_to is not None and (rule.offset or any(source.rows for source in rule.sources)):
            raise PluginError(f"{plan.family}: {name} may be tied, so its rule takes neither pieces nor an offset")
        if rule.tied_to is not None and (rule.tied_to not in rules or rules[rule.tied_to].tied_to is not None):
            raise PluginError(f"{plan.family}: {name} is tied to {rule.tied_to}, which has no rule of its own")


def _stacked_shape(plan: ModelPlan, rule: WeightRule) -> tuple[int, ...]:
    shapes = [source.shape for source in rule.sources]
    if not shapes or any(len(shape) == 0 or shape[1:] != shapes[0][1:] for shape in shapes):
        raise PluginError(f"{plan.family}: the sources of {rule.parameter} cannot be stacked: {shapes}")
    for source in rule.sources:
        order = [row for first, count in source.rows for row in range(first, first + count)]
        if order and sorted(order) != list(range(source.shape[0])):
            raise PluginError(f"{plan.family}: the pieces of {source.name} do not have each of its rows once")
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _check_names(plan: ModelPlan, stored: Mapping[str, StoredTensor], path: Path) -> None:
    """Nothing missing, nothing unknown."""
    missing: list[str] = []
    for rule in plan.weight_rules:
        absent = [source for source in rule.sources if source.name not in stored]
        if rule.tied_to is None or len(absent) < len(rule.sources):
            missing.extend(f"{source.name} {list(source.shape)}" for source in absent)
    expected = {source.name for rule in plan.weight_rules for source in rule.sources}
    skipped = [re.compile(pattern) for pattern in plan.skipped_tensors]
    extra = [
        f"{name} ({stored[name].file.name})"
        for name in stored
        if name not in expected and not any(pattern.fullmatch(name) for pattern in skipped)
    ]
    if missing or extra:
        complaints = [f"lacks {_listed(missing)}"] if missing else []
        complaints += [f"has {_listed(extra)}, which {plan.family} does not know"] if extra else []
        raise CheckpointError(f"{path}: the checkpoint {' and '.join(complaints)}")


def _check_sources(plan: ModelPlan, rule: WeightRule, stored: Mapping[str, StoredTensor]) -> None:
    """Shapes and types of one rule's tensors."""
    expected = {source.name: source.shape for source in rule.sources}
    for found in _sources(rule, stored):
        if found.dtype not in SUPPORTED_DTYPES:
            supported = ", ".join(SUPPORTED_DTYPES)
            raise CheckpointError(
                f"{found.file}: tensor {found.name} has type {found.dtype}; {plan.family} supports {supported}"
            )
        if found.shape != expected[found.name]:
            raise CheckpointError(
                f"{found.file}: tensor {found.name} has shape {list(found.shape)}; "
                f"config.json implies {list(expected[found.name])}"
            )


def _listed(names: Iterable[str], most: int = 3) -> str:
    """The first few names and how many more there are."""
    found: Sequence[str] = sorted(names)
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "none") + rest


# values


class _Progress:
    """Adds up bytes for the callback."""

    def __init__(self, callback: Progress | None, total: int) -> None:
        self._callback = callback
        self._total = total
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """Count and tell."""
        if not num_bytes:
            return
        self._done += num_bytes
        if self._callback is not None:
            self._callback(self._done, self._total)


def _stack(rule: WeightRule, sources: Sequence[StoredTensor], value: Tensor) -> list[Move]:
    """One below the other, in `value`, each in its rule's order of rows."""
    moves: list[Move] = []
    start = 0
    for spec, source in zip(rule.sources, sources, strict=True):
        row_bytes = source.num_bytes // source.shape[0]
        for first, count in spec.rows or ((0, source.shape[0]),):
            place = source.offset + first * row_bytes
            piece = dataclasses.replace(source, offset=place, shape=(count, *source.shape[1:]))
            moves.append(Move(piece, value[start : start + count]))
            start += count
    assert start == value.shape[0], "the checks above let through only complete stacks"
    return moves


def _shares(sources: Sequence[StoredTensor], others: Sequence[StoredTensor]) -> bool:
    """Whether a tied parameter is left out of the checkpoint, or in it bit for bit as the other parameter is."""
    if not sources:
        return True
    return len(sources) == len(others) and all(map(equal_bytes, sources, others))


def _set_parameter(model: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent).register_parameter(leaf, value)
