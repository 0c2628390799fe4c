"""Types of a struct's fields, checked when it is made by hand: msgspec itself checks only what it decodes.

Owns that check. Knows no struct.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec

_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


def wrong_fields(struct: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """(field, what it must be and is) of every field whose value is of another type, or an integer of more than 64 bits.

    An int is a float; a bool is neither.
    """
    for name, hint in _hints(type(struct)).items():
        value = getattr(struct, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            wanted = hint.__name__ if type(hint) is type else str(hint).replace("typing.", "")
            yield name, f"must be {wanted}, got {value!r}"[:300]
            continue
        if type(value) is int and not _SMALLEST <= value <= _LARGEST:
            yield name, f"must be a 64-bit integer, got {str(value)[:40]}"


@functools.cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind)
