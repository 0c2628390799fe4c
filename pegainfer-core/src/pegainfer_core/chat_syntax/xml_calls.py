"""Calls as Qwen3-Coder and Qwen3.5 write them: tags with the values as bare text on lines of their own.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Owns that syntax. The types of values come from the tool's schema. Tolerates a missing <tool_call> and missing closing tags; a closing
tag inside a value is part of it unless what must follow one follows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegainfer_core.chat_syntax.arguments import ArgumentTypes
from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.object_writer import ObjectWriter, value_expression
from pegainfer_core.chat_syntax.source import Finder, Pattern, TextSource, Waiting, ignore
from pegainfer_core.chat_syntax.syntax import CallSink, CallSyntax, Tool, Tools, argument_types, mark_expression
from pegainfer_core.structured import LarkBuilder

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_TAG_END = Finder(Pattern(">"), Pattern("\n"))
_NAME = re.compile(r"[^\s<>]+")


class XmlCalls(CallSyntax):
    """The syntax."""

    separator = "\n"

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._open, self._close = marks("<tool_call>"), marks("</tool_call>")

    @property
    def openers(self) -> Sequence[Pattern]:
        """See CallSyntax."""
        return [Pattern(self._open, None, _FUNCTION), Pattern(_FUNCTION)]

    def read(self, source: TextSource, tools: Tools, sink: CallSink) -> Waiting[bool]:
        """See CallSyntax."""
        yield from source.expect(self._open, None)
        yield from source.expect(_FUNCTION)
        name = yield from _read_name(source)
        if name is None:
            return False
        sink.start(name)
        types = argument_types(tools, name)
        writer = ObjectWriter(sink, types)
        value_end = self._value_end(types)
        following = Finder(Pattern(_PARAMETER), Pattern(_FUNCTION_END), Pattern(self._close), Pattern(self._open))
        while (found := (yield from source.until(following, ignore))) == 0:
            source.take(len(_PARAMETER))
            key = yield from _read_name(source)
            if key is not None:
                writer.begin(key)
                complete = yield from self._read_value(source, writer, value_end)
                if complete or not source.cut:
                    writer.end()
        if found is not None or not source.cut:
            writer.close()
        yield from source.expect(_FUNCTION_END)
        yield from source.skip_space()
        yield from source.expect(self._close)
        sink.end()
        return True

    def _value_end(self, types: ArgumentTypes) -> Finder:
        after = (_PARAMETER, _FUNCTION_END, self._close, "")
        unclosed = [Pattern(f"\n{_PARAMETER}{name}>") for name in types.names]
        return Finder(
            Pattern(_PARAMETER_END, None, after),
            Pattern(_FUNCTION_END, None, (self._close, "")),
            Pattern(self._close, None, ""),
            Pattern(self._close, None, self._open, None, _FUNCTION),
            *unclosed,
        )

    def _read_value(self, source: TextSource, writer: ObjectWriter, value_end: Finder) -> Waiting[bool]:
        """One value; False if the text ended in it."""
        yield from source.expect("\n")
        found = yield from source.until(value_end, writer.text, held="\n", most_held=1)
        if found is None:
            writer.text(source.take_rest().removesuffix("\n"))
        yield from source.expect("\n")
        if found == 0:
            yield from source.expect(_PARAMETER_END)
        return found is not None

    def forced(self, builder: LarkBuilder, tool: Tool) -> str:
        """See CallSyntax. Values are bound to their declared types; required ones must be there, in the order of the schema."""
        opening, closing = (mark_expression(builder, self._marks, mark) for mark in ("<tool_call>", "</tool_call>"))
        parts = [opening, builder.text(f"\n{_FUNCTION}{tool.name}>\n")]
        required = tool.arguments_schema.get("required") or ()
        for name in tool.arguments_schema.get("properties") or {}:
            head = builder.text(f"{_PARAMETER}{name}>\n")
            value = value_expression(builder, tool, name, self._marks, before="\n", end=_PARAMETER_END)
            part = builder.sequence(head, value, builder.text("\n"))
            parts.append(part if name in required else builder.optional(part))
        return builder.sequence(*parts, builder.text(f"{_FUNCTION_END}\n"), closing)


def _read_name(source: TextSource) -> Waiting[str | None]:
    """A name and the tag's end after it."""
    parts: list[str] = []
    found = yield from source.until(_TAG_END, parts.append)
    name = "".join(parts).strip()
    if found != 0 or _NAME.fullmatch(name) is None:
        return None
    source.take(1)
    return name
