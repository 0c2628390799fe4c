"""What families need to read a checkpoint's config.json: the strict reader, rope, type and EOS ids.

The one module a family imports for this; parts live in `config_reader` and `rope_config`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pegainfer_core.config_reader import REQUIRED, ConfigReader, shown
from pegainfer_core.errors import ConfigError
from pegainfer_core.rope_config import (
    ROPE_TYPES,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeType,
    YarnScaling,
    paired_rows,
    read_rope,
    rotary_rows,
    yarn_mscale,
)

__all__ = [
    "REQUIRED",
    "ROPE_TYPES",
    "CheckpointDType",
    "ConfigReader",
    "LinearScaling",
    "Llama3Scaling",
    "RopeConfig",
    "RopeType",
    "YarnScaling",
    "paired_rows",
    "read_dtype",
    "read_eos",
    "read_rope",
    "rotary_rows",
    "yarn_mscale",
]

CheckpointDType = Literal["float32", "bfloat16", "float16"]


def read_dtype(config: Mapping[str, Any]) -> CheckpointDType:
    """Type of the published weights: `dtype`, or `torch_dtype` as older files spell it.

    Absent in both: float32, the one type that holds any checkpoint's values exactly. Raises ConfigError for other types
    and for two spellings that differ.
    """
    supported: tuple[CheckpointDType, ...] = get_args(CheckpointDType)
    found: dict[str, CheckpointDType] = {}
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is None:
            continue
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        matches = [dtype for dtype in supported if dtype == name]
        if not matches:
            names = ", ".join(repr(dtype) for dtype in supported)
            raise ConfigError(f"config.json: {key} is {shown(value)}; supported are {names}")
        found[key] = matches[0]
    if len(set(found.values())) > 1:
        raise ConfigError(f"config.json: dtype is {found['dtype']!r} but torch_dtype is {found['torch_dtype']!r}")
    return next(iter(found.values()), "float32")


def read_eos(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Union of `eos_token_id` in config.json and generation_config.json, each an id, a list of ids, null or absent."""
    ids: set[int] = set()
    for file, mapping in (("config.json", config), ("generation_config.json", generation_config or {})):
        value = mapping.get("eos_token_id")
        items = [] if value is None else value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise ConfigError(f"{file}: eos_token_id is {shown(value)}; it must be a token id or a list of them")
            ids.add(item)
    return frozenset(ids)
