"""Entry point: tells pegainfer which families this distribution serves. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer_core.family import ModelFamily
from pegainfer_core.hookspecs import hookimpl

from pegainfer_qwen35.family import Qwen35Family


@hookimpl
def pegainfer_model_families() -> Sequence[ModelFamily]:
    """Qwen3.5."""
    return [Qwen35Family()]
