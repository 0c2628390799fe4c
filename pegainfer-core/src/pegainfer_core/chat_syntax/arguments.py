"""Arguments that a model writes as bare text, as JSON values of the types that the tool's schema declares.

Owns the conversion. Text that fits no declared type stays a string, so that no call is lost over it. Knows no syntax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DEPTH = 8  # of references and alternatives that are followed
_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_BOOLEANS = {"true": True, "false": False}
_NULLS = ("null", "none")


class ArgumentTypes:
    """The declared types of one tool's parameters."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        """`schema`: the JSON schema of the arguments object."""
        self._root = schema if isinstance(schema, Mapping) else {}
        properties = self._root.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    @property
    def names(self) -> list[str]:
        """The declared parameters."""
        return [str(name) for name in self._properties]

    def is_text(self, name: str) -> bool:
        """Whether the parameter is a string and nothing else: its value can be told while it is written."""
        return frozenset(self._types(name)) == {"string"}

    def to_json(self, name: str, text: str) -> str:
        """The value as JSON text. Without a declared type: JSON if it is JSON, else a string."""
        types = list(dict.fromkeys(self._types(name)))
        if not types:
            types = ["null", "boolean", "number", "array", "object"]
        for kind in sorted(types, key=_ORDER.index):
            value = _convert(kind, text)
            if value is not None:
                return value
        return quoted(text)

    def _types(self, name: str) -> Iterator[str]:
        return self._types_of(self._properties.get(name), _DEPTH)

    def _types_of(self, schema: Any, depth: int) -> Iterator[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return
        declared = schema.get("type")
        kinds = declared if isinstance(declared, list) else [declared]
        named = [kind for kind in kinds if isinstance(kind, str) and kind in _TYPES]
        yield from named
        if not named:
            yield from (_type_name(value) for value in _listed(schema.get("enum")))
            if "const" in schema:
                yield _type_name(schema["const"])
        for keyword in ("anyOf", "oneOf", "allOf"):
            for option in _listed(schema.get(keyword)):
                yield from self._types_of(option, depth - 1)
        if isinstance(schema.get("$ref"), str):
            yield from self._types_of(self._referenced(schema["$ref"]), depth - 1)

    def _referenced(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


_ORDER: Sequence[str] = ("null", "boolean", "integer", "number", "array", "object", "string")
"""Which type of several is tried first: a text that can be anything is a string only if it is nothing else."""


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A piece of text as it stands inside a JSON string; pieces may be joined."""
    return quoted(text)[1:-1]


def parse_json(text: str) -> tuple[bool, Any]:
    """(whether it is JSON, its value); NaN and infinities are not."""
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(name: str) -> None:
    raise ValueError(name)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _convert(kind: str, text: str) -> str | None:
    """The text as JSON of this type, or None."""
    bare = text.strip()
    if kind == "string":
        return quoted(text)
    if kind == "null":
        return "null" if bare.lower() in _NULLS else None
    if kind == "boolean":
        return json.dumps(_BOOLEANS[bare.lower()]) if bare.lower() in _BOOLEANS else None
    if kind in ("integer", "number"):
        return _number(bare, whole=kind == "integer")
    is_json, value = parse_json(bare)
    return bare if is_json and isinstance(value, list if kind == "array" else dict) else None


def _number(text: str, *, whole: bool) -> str | None:
    is_json, value = parse_json(text)
    if not is_json:
        is_json, value = parse_json(text.removeprefix("+")) if text[:1] == "+" else (False, None)
        text = text.removeprefix("+")
    if not is_json or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if not whole or isinstance(value, int):
        return text
    return str(int(value)) if value.is_integer() else None
