"""The conformance kit fails an engine that mixes up recurrent states: each mistake must trip the check that is there for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core import batch
from pegainfer_core.kv.storage import StateStorage
from pegainfer_core.ops.states import States
from pegainfer_core.testing.conformance import FamilyConformance
from pegainfer_core.testing.engine_driver import EngineDriver
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_qwen35.family import Qwen35Family
from pegainfer_qwen35.testing import tiny_config


class Kit(FamilyConformance):
    """The kit, to be called by hand."""

    family = Qwen35Family()
    plugin = "pegainfer_qwen35.plugin"
    configs = {"tiny": tiny_config()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sound"), Kit.family, Kit.first_config())


def hits(checkpoint: Path) -> None:
    """The check of prefix hits."""
    cold = EngineDriver(checkpoint, page_size=Kit.page_size, prefix_cache=False)
    Kit().test_prefix_hit_equals_cold(1, True, checkpoint, cold)


def slots(checkpoint: Path) -> None:
    """The check of slots that many requests use."""
    expected = [EngineDriver(checkpoint, page_size=Kit.page_size).generate([prompt])[0] for prompt in Kit().prompts()]
    Kit().test_many_requests_share_few_slots(checkpoint, expected)


def nothing(self: StateStorage, one: int, other: int) -> None:
    """A copy that is not made."""


def another_slot(self: StateStorage, slot: int, snapshot: int) -> None:
    """Saves the state of a request that is not there."""
    self._copy(slot + 1, self._first_snapshot + snapshot)


def misplaced(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., States]:
    """States, but for a change."""
    return lambda **fields: States(**(fields | change(fields)))


def never_fresh(fields: dict[str, Any]) -> dict[str, Any]:
    """Every row begins from what is in its slot, zeros at first."""
    for tensor in (tensor for layer in fields["layers"] for tensor in layer):
        tensor.nan_to_num_(0.0)
    return {"fresh_R": torch.zeros_like(fields["fresh_R"])}


def swapped(fields: dict[str, Any]) -> dict[str, Any]:
    """Rows of a batch have each other's slots."""
    return {"slots_R": fields["slots_R"].flip(0)}


@pytest.mark.parametrize(
    ("check", "target", "name", "mistake"),
    [
        (hits, StateStorage, "restore", nothing),
        (hits, StateStorage, "save", another_slot),
        (slots, batch, "States", misplaced(never_fresh)),
        (slots, batch, "States", misplaced(swapped)),
    ],
    ids=["nothing restored", "another slot saved", "never fresh", "slots swapped"],
)
def test_mistakes_with_states(
    check: Callable[[Path], None],
    target: Any,
    name: str,
    mistake: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(checkpoint)
    monkeypatch.setattr(target, name, mistake)
    with pytest.raises(AssertionError):
        check(checkpoint)
