"""The tensors of a checkpoint's safetensors files: names, shapes, types, and where their bytes lie.

Owns the reading of headers and bytes. Files are read, never mapped, so that what was read does not count as memory of
this process. Knows neither rules nor devices.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from pegainfer_core.checkpoint import weight_files
from pegainfer_core.errors import CheckpointError

SUPPORTED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of checkpoint tensors, by their names in safetensors headers."""

COMPARED_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""
    offset: int
    """First byte in the file."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Only for supported types."""
        return SUPPORTED_DTYPES[self.dtype]

    @property
    def num_values(self) -> int:
        """Values in it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file; only for supported types."""
        return self.num_values * self.torch_dtype.itemsize


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory by name. Raises CheckpointError for damaged files and repeated names."""
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_files(path).values())):  # which checks that each file is complete
        for tensor in _read_header(file):
            if tensor.name in stored:
                raise CheckpointError(f"tensor {tensor.name} is in two files: {stored[tensor.name].file} and {file}")
            stored[tensor.name] = tensor
    return stored


def read_into(opened: io.FileIO, offset: int, place: Tensor) -> bool:
    """Fill `place` (uint8, on the CPU) with the bytes of a file from `offset` on; False if the file ends before."""
    array: Any = place.numpy()
    view = memoryview(array)
    opened.seek(offset)
    while view:
        count = opened.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same type and shape and are the same bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with one.file.open("rb") as first, other.file.open("rb") as second:
            first.seek(one.offset)
            second.seek(other.offset)
            left = one.num_bytes
            while left:
                count = min(left, COMPARED_BYTES)
                if first.read(count) != second.read(count):
                    return False
                left -= count
    except OSError as error:
        raise CheckpointError(f"tensors {one.name} and {other.name} cannot be read: {error}") from error
    return True


def _read_header(file: Path) -> Iterator[StoredTensor]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        for name, raw in header.items():
            entry = msgspec.json.decode(raw, type=_Entry)
            offset = 8 + length + entry.data_offsets[0]
            yield StoredTensor(name=name, file=file, shape=entry.shape, dtype=entry.dtype, offset=offset)
    except (msgspec.MsgspecError, OSError) as error:
        raise CheckpointError(f"{file} is no complete safetensors file: {error}") from error
