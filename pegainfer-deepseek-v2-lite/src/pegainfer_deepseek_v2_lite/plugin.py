"""Entry point: tells pegainfer which families this distribution serves. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer_core.family import ModelFamily
from pegainfer_core.hookspecs import hookimpl

from pegainfer_deepseek_v2_lite.family import DeepseekV2LiteFamily


@hookimpl
def pegainfer_model_families() -> Sequence[ModelFamily]:
    """DeepSeek-V2-Lite."""
    return [DeepseekV2LiteFamily()]
