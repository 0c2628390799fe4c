"""Entry point: the module that `[project.entry-points.pegainfer]` names. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer_core.family import ModelFamily
from pegainfer_core.hookspecs import hookimpl

from pegainfer_llama.family import LlamaFamily


@hookimpl
def pegainfer_model_families() -> Sequence[ModelFamily]:
    """Llama."""
    return [LlamaFamily()]
