"""The arguments object of a call whose values come as bare text, written as JSON while they come.

Owns quotes, commas and types. A string is told as it grows; any other value once it is complete, because only then its type is known.
"""

from __future__ import annotations

from typing import Any

from pegainfer_core.chat_syntax.arguments import ArgumentTypes, escaped, quoted
from pegainfer_core.chat_syntax.syntax import CallSink, Tool
from pegainfer_core.structured import LarkBuilder


class ObjectWriter:
    """Writes one object to a sink: begin, text, end for each value, then close."""

    def __init__(self, sink: CallSink, types: ArgumentTypes) -> None:
        self._sink = sink
        self._types = types
        self._before = "{"
        self._name = ""
        self._held: list[str] | None = None
        """A value's text, if it is told at its end."""

    def begin(self, name: str) -> None:
        """A value begins."""
        self._name = name
        self._held = None if self._types.is_text(name) else []
        quote = '"' if self._held is None else ""
        self._sink.arguments(f"{self._before}{quoted(name)}: {quote}")
        self._before = ", "

    def text(self, text: str) -> None:
        """More of the value's text."""
        if self._held is None:
            self._sink.arguments(escaped(text))
        else:
            self._held.append(text)

    def end(self) -> None:
        """The value is complete."""
        self._sink.arguments('"' if self._held is None else self._types.to_json(self._name, "".join(self._held)))

    def close(self) -> None:
        """The object is complete."""
        self._sink.arguments("{}" if self._before == "{" else "}")


def value_expression(builder: LarkBuilder, tool: Tool, name: str, schema: Any, *, end: str) -> str:
    """For a grammar: the bare text of one value and what ends it."""
    types = ArgumentTypes(tool.parameters)
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list) and types.is_text(name):
        options = [builder.text(str(value)) for value in schema["enum"]]
        return builder.sequence(builder.any_of(options), builder.text(end))
    if types.is_text(name) or not isinstance(schema, dict):
        return builder.up_to(end)
    inherited = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return builder.sequence(builder.json({**inherited, **schema}, strict=tool.strict), builder.text(end))
