"""Ways to damage a checkpoint, for tests that want the error.

Each function changes the files of a checkpoint directory in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pegainfer_core.checkpoint import weight_files


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes a key."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def edit_file_of(path: Path, name: str, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """Rewrite the file that holds tensor `name` after `edit` changed its tensors; returns the file."""
    file = weight_files(path)[name]
    tensors = load(file.read_bytes())
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return file


def drop_tensor(path: Path, name: str) -> Path:
    """Take a tensor out of its file; an index keeps naming it."""
    return edit_file_of(path, name, lambda tensors: tensors.__delitem__(name))


def add_tensor(path: Path, name: str, beside: str, value: Tensor | None = None) -> Path:
    """Put a tensor that nobody declared into the file of tensor `beside`."""
    added = torch.ones(4) if value is None else value
    return edit_file_of(path, beside, lambda tensors: tensors.__setitem__(name, added))


def reshape_tensor(path: Path, name: str) -> Path:
    """Give a tensor one row more than it should have."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    return edit_file_of(path, name, edit)


def retype_tensor(path: Path, name: str, dtype: torch.dtype) -> Path:
    """Store a tensor in another type, for example torch.int8 or torch.float8_e4m3fn."""
    return edit_file_of(path, name, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def remove_file_of(path: Path, name: str) -> Path:
    """Delete the file that holds a tensor."""
    file = weight_files(path)[name]
    file.unlink()
    return file


def truncate_file_of(path: Path, name: str, num_bytes: int = 100) -> Path:
    """Cut the last bytes off the file that holds a tensor."""
    file = weight_files(path)[name]
    file.write_bytes(file.read_bytes()[:-num_bytes])
    return file
