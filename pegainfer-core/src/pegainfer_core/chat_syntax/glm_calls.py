"""Calls as GLM-4.5 to GLM-5 write them: keys and values between tags, with or without line breaks between these.

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>

Owns that syntax. The types of values come from the tool's schema: strings are written bare, everything else as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.object_writer import ObjectWriter, value_expression
from pegainfer_core.chat_syntax.source import Finder, Pattern, TextSource, Waiting, ignore
from pegainfer_core.chat_syntax.syntax import CallSink, CallSyntax, Tool, Tools, argument_types, mark_expression
from pegainfer_core.structured import LarkBuilder

_NAME = re.compile(r"[\w.:/-]")
_CALL = ("<tool_call>", "</tool_call>")
_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")


class GlmCalls(CallSyntax):
    """The syntax."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        (self._open, self._close), (self._key, self._key_end), (self._value, self._value_end) = (
            (marks(opening), marks(closing)) for opening, closing in (_CALL, _KEY, _VALUE)
        )
        after = (self._key, self._close, "")
        self._end_of_key = Finder(Pattern(self._key_end))
        self._end_of_value = Finder(Pattern(self._value_end, None, after), Pattern(self._close, None, ""))
        self._next = Finder(Pattern(self._key), Pattern(self._close), Pattern(self._open))

    @property
    def openers(self) -> Sequence[Pattern]:
        """See CallSyntax."""
        return [Pattern(self._open)]

    def read(self, source: TextSource, tools: Tools, sink: CallSink) -> Waiting[bool]:
        """See CallSyntax."""
        yield from source.expect(self._open)
        name = yield from self._read_name(source)
        if name is None:
            return False
        sink.start(name)
        writer = ObjectWriter(sink, argument_types(tools, name))
        while (found := (yield from source.until(self._next, ignore))) == 0:
            yield from self._read_argument(source, writer)
        if found is not None or not source.cut:
            writer.close()
        yield from source.expect(self._close)
        sink.end()
        return True

    def _read_name(self, source: TextSource) -> Waiting[str | None]:
        """A name and, unread, what must follow it; anything else is prose that names the mark."""
        yield from source.skip_space()
        name = ""
        while _NAME.fullmatch((yield from source.peek())):
            name += source.take(1)
        yield from source.skip_space()
        follows = yield from source.looking_at(Pattern((self._key, self._close)))
        return name if name and follows is not None else None

    def _read_argument(self, source: TextSource, writer: ObjectWriter) -> Waiting[None]:
        yield from source.expect(self._key)
        key: list[str] = []
        yield from source.until(self._end_of_key, key.append)
        yield from source.expect(self._key_end)
        yield from source.skip_space()
        if not (yield from source.expect(self._value)):
            return
        writer.begin("".join(key).strip())
        found = yield from source.until(self._end_of_value, writer.text)
        if found is None:
            writer.text(source.take_rest())
        if found is not None or not source.cut:
            writer.end()
        if found == 0:
            yield from source.expect(self._value_end)

    def forced(self, builder: LarkBuilder, tool: Tool) -> str:
        """See CallSyntax. Values are bound to their declared types; required ones must be there, in the order of the schema."""
        written = (*_CALL, *_KEY, _VALUE[0])
        opening, closing, key, key_end, value = (mark_expression(builder, self._marks, mark) for mark in written)
        parts = [opening, builder.text(tool.name)]
        required = tool.arguments_schema.get("required") or ()
        for name in tool.arguments_schema.get("properties") or {}:
            text = value_expression(builder, tool, name, self._marks, end=_VALUE[1])
            part = builder.sequence(key, builder.text(name), key_end, value, text)
            parts.append(part if name in required else builder.optional(part))
        return builder.sequence(*parts, closing)
