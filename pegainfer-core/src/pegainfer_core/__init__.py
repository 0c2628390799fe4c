"""pegainfer's engine: scheduling, KV cache, sampling, weights and the plugin seam. No HTTP, no command line.

Public names are listed here. `LLM` is imported on first use, because it pulls in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PegainferError,
    PluginError,
    RequestError,
    UnsupportedModelError,
)
from pegainfer_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pegainfer_core.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "PegainferError",
    "PluginError",
    "RequestError",
    "SamplingParams",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pegainfer_core.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
