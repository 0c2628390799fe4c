"""Calls as JSON objects between two marks, as Hermes models and Qwen2.5 and Qwen3 write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Owns that syntax. Tolerates what models do to it: a list of calls, keys in another order, `parameters` for `arguments`, arguments as
a string that holds JSON, a missing closing mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.chat_syntax.arguments import parse_json
from pegainfer_core.chat_syntax.json_text import read_string, read_value
from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.source import Emit, Pattern, TextSource, Waiting
from pegainfer_core.chat_syntax.syntax import CallSink, CallSyntax, Tool, Tools, mark_expression
from pegainfer_core.structured import LarkBuilder

_ARGUMENT_KEYS = ("arguments", "parameters")
_LEFTOVERS = "}],; \t\r\n"  # after a call's object: brackets too many, and what separates list items


class JsonCalls(CallSyntax):
    """The syntax, with marks that differ between models."""

    separator = "\n"

    def __init__(self, marks: Marks, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self._marks = marks
        self._written = opening, closing
        self._open, self._close = marks(opening), marks(closing)

    @property
    def openers(self) -> Sequence[Pattern]:
        """See CallSyntax."""
        return [Pattern(self._open, None, ("{", "["))]

    def read(self, source: TextSource, tools: Tools, sink: CallSink) -> Waiting[bool]:
        """See CallSyntax."""
        del tools
        yield from source.expect(self._open, None)
        yield from source.expect("[")
        is_call = yield from _read_object(source, sink)
        more = is_call
        while more and (yield from self._another(source)):
            more = yield from _read_object(source, sink)
        if is_call:
            yield from source.expect(self._close)
        return is_call

    def _another(self, source: TextSource) -> Waiting[bool]:
        """Whether a further object comes before the closing mark; takes what stands in between."""
        while (following := (yield from source.peek())) != "" and following in _LEFTOVERS:
            source.take(1)
        return following == "{"

    def forced(self, builder: LarkBuilder, tool: Tool) -> str:
        """See CallSyntax."""
        opening, closing = (mark_expression(builder, self._marks, written) for written in self._written)
        head = '\n{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
        arguments = builder.json(tool.arguments_schema, strict=tool.strict)
        return builder.sequence(opening, builder.text(head), arguments, builder.text("}\n"), closing)

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """See CallSyntax."""
        opening, closing = self._written
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            f"You can call these functions, described by their JSON schemas:\n{listed}\n\n"
            f'To call one, answer with its name and arguments like this:\n{opening}\n{{"name": "...", "arguments": {{...}}}}\n{closing}'
        )

    def written(self, name: str, arguments: Any) -> str:
        """See CallSyntax."""
        opening, closing = self._written
        return f"{opening}\n{super().written(name, arguments)}\n{closing}"


def _read_object(source: TextSource, sink: CallSink) -> Waiting[bool]:
    """One call's object, as far as it goes; False if it has no name."""
    yield from source.skip_space()
    if not (yield from source.expect("{")):
        return False
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    started = False
    while isinstance(key := (yield from _next_key(source)), str):
        if key in _ARGUMENT_KEYS and not started and not early:
            if name:
                started = True
                sink.start(name)
            yield from source.skip_space()
            yield from _read_arguments(source, sink.arguments if started else early.append)
        elif key == "name" and name is None:
            yield from source.skip_space()
            name = yield from read_string(source)
            if not name:
                return False
        else:
            yield from source.skip_space()
            yield from read_value(source)
    if not name or (source.cut and not started and not key):
        return False
    if not started:
        sink.start(name)
        sink.arguments("".join(early) or "{}")
    sink.end()
    return True


def _next_key(source: TextSource) -> Waiting[str | bool]:
    """The next key of an object, its colon taken; True at the object's end, which is taken too; False where the JSON breaks."""
    yield from source.skip_space()
    while (yield from source.expect(",")):
        yield from source.skip_space()
    if (yield from source.expect("}")):
        return True
    key = yield from read_string(source)
    yield from source.skip_space()
    if key is None or not (yield from source.expect(":")):
        return False
    return key


def _read_arguments(source: TextSource, emit: Emit) -> Waiting[None]:
    """The arguments' value: an object as it is written; a string that holds one, unpacked; null as the empty object."""
    first = yield from source.peek()
    if first in ("{", "["):
        yield from read_value(source, emit)
        return
    parts: list[str] = []
    complete = yield from read_value(source, parts.append)
    text = "".join(parts)
    is_json, value = parse_json(text)
    if not complete and not is_json:
        return
    if value is None:
        emit("{}")
    elif isinstance(value, str):
        emit(value if parse_json(value)[0] else text)
    else:
        emit(text)
