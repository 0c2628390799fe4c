"""The hooks of core. Each is documented in docs/hooks.md and has a test; a test compares the three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pegainfer_core.engine import StepReport
    from pegainfer_core.family import ModelFamily

hookspec = pluggy.HookspecMarker("pegainfer")
hookimpl = pluggy.HookimplMarker("pegainfer")
"""Marks a plugin's implementation of a hook."""


@hookspec
def pegainfer_model_families() -> Sequence[ModelFamily]:  # type: ignore[empty-body]
    """Return the families this distribution serves.

    Called once per process, when plugins are loaded. Import nothing heavy: neither torch nor transformers nor triton.
    """


@hookspec
def pegainfer_step_finished(report: StepReport) -> None:
    """Observe one engine step: called in the engine process once per step, never per token, and skipped when nobody listens.

    Return value is ignored. An exception is logged once and the observer is not called again.
    """
