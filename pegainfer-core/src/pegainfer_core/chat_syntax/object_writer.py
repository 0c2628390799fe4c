"""The arguments object of a call whose values come as bare text, written as JSON while they come.

Owns quotes, commas and types. A string is told as it grows; any other value once it is complete, because only then its type is known.
"""

from __future__ import annotations

from pegainfer_core.chat_syntax.arguments import ArgumentTypes, escaped, quoted
from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.syntax import CallSink, Tool, mark_expression
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


def value_expression(builder: LarkBuilder, tool: Tool, name: str, marks: Marks, *, before: str = "", end: str) -> str:
    """For a grammar: the bare text of one value, what stands `before` its end, and the mark `end`."""
    types = ArgumentTypes(tool.parameters)
    schema = tool.arguments_schema["properties"][name]
    if types.is_text(name) and not schema.get("enum"):
        if marks.is_special(end):
            return builder.sequence(builder.pattern("(?s:.*)"), mark_expression(builder, marks, end))
        return builder.up_to(before + end)
    if types.is_text(name):
        value = builder.any_of([builder.text(str(option)) for option in schema["enum"]])
    else:
        inherited = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        value = builder.json({**inherited, **schema} if isinstance(schema, dict) else {}, strict=tool.strict)
    return builder.sequence(value, builder.text(before), mark_expression(builder, marks, end))
