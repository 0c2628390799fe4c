"""The checks of a start without the start: flags against this machine, the files against the plan.

Owns which checks `pegainfer inspect` makes, with the very functions that `serve` fails in. Reads headers, never weights; what is not
here (weights of a hub repository that were not downloaded) is not checked.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pegainfer_core.checkpoint import INDEX_FILE, SINGLE_FILE, has_foreign_weights
from pegainfer_core.config import EngineConfig
from pegainfer_core.plugins import Plugins
from pegainfer_core.resolve import ResolvedModel, resolve_model


def dry_start(config: EngineConfig, plugins: Plugins) -> tuple[ResolvedModel, Collection[str] | None]:
    """The model, and names of the tensors in its files (None if there are none). Raises ConfigError as a start would."""
    from pegainfer_core.memory import check_flags

    resolved = resolve_model(config, plugins, configs_only=True)
    check_flags(resolved)
    path = resolved.checkpoint.path
    present = _checked_tensors(resolved, path)
    if present is not None or (path / "tokenizer.json").exists():
        resolved.load_chat_format(resolved.load_tokenizer())
    from pegainfer_server.sampling import defaults_from_generation_config

    defaults_from_generation_config(resolved.checkpoint.generation_config)
    return resolved, present


def _checked_tensors(resolved: ResolvedModel, path: Path) -> Collection[str] | None:
    from pegainfer_core.weights import check_tensors

    if not (path / SINGLE_FILE).exists() and not (path / INDEX_FILE).exists() and not has_foreign_weights(path):
        return None
    return check_tensors(resolved.plan, path)
