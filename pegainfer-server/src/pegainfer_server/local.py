"""A model in this process, for commands that need no server. Imports torch, so only when such a command runs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from pegainfer_core.config import EngineConfig
from pegainfer_core.llm import LLM
from pegainfer_core.messages import LoadProgress


def open_llm(config: EngineConfig, on_progress: Callable[[LoadProgress], None] | None = None) -> LLM:
    """The model of `config`, loaded. Use as a context manager. Raises ConfigError and its kinds."""
    return LLM(on_progress=on_progress, **msgspec.structs.asdict(config))
