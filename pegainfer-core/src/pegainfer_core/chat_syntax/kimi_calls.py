"""Calls as Kimi K2 writes them: special tokens around an id `functions.NAME:N` and the arguments' JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

Owns that syntax, and the ids: the model counts calls through the whole dialogue, and stops calling when it is shown ids of another form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.source import SPACE, Finder, Pattern, TextSource, Waiting
from pegainfer_core.chat_syntax.syntax import CallSink, CallSyntax, Tool, Tools, mark_expression
from pegainfer_core.structured import LarkBuilder

_HEADER = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+?)(?::\d+)?")
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_SECTION_SINGULAR = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")  # some conversions write it so
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiCalls(CallSyntax):
    """The syntax."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._sections = (marks(_SECTION[0]), marks(_SECTION_SINGULAR[0]))
        self._sections_end = (marks(_SECTION[1]), marks(_SECTION_SINGULAR[1]))
        self._call, self._call_end = marks(_CALL[0]), marks(_CALL[1])
        self._argument = marks(_ARGUMENTS)

    @property
    def openers(self) -> Sequence[Pattern]:
        """See CallSyntax."""
        return [Pattern(self._sections, None, self._call), Pattern(self._call)]

    def read(self, source: TextSource, tools: Tools, sink: CallSink) -> Waiting[bool]:
        """See CallSyntax. Reads all calls of a section."""
        del tools
        yield from source.expect(self._sections, None)
        any_call = False
        while (yield from source.expect(self._call)):
            if not (yield from self._read_call(source, sink)):
                return any_call
            any_call = True
            yield from source.skip_space()
        yield from source.expect(self._sections_end)
        return any_call

    def _read_call(self, source: TextSource, sink: CallSink) -> Waiting[bool]:
        header: list[str] = []
        ends = (Pattern(self._call_end), Pattern(self._sections_end))
        found = yield from source.until(Finder(Pattern(self._argument), *ends), header.append)
        match = _HEADER.fullmatch("".join(header).strip())
        if found != 0 or match is None:
            return False
        source.take(len(self._argument))
        sink.start(match["name"])
        arguments = _Counted(sink)
        yield from source.skip_space()
        found = yield from source.until(Finder(*ends), arguments.emit, held=SPACE)
        yield from source.skip_space()
        if found == 0:
            source.take(len(self._call_end))
        elif found is None:
            sink.arguments(source.take_rest())
        if found is not None and not arguments.any:
            sink.arguments("{}")
        sink.end()
        return True

    def call_id(self, name: str, number: int) -> str:
        """See CallSyntax."""
        return f"functions.{name}:{number}"

    def history(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages with every call id in the model's form, numbered through the dialogue; results refer to the new ids."""
        renamed: dict[str, str] = {}
        number = 0
        result: list[Mapping[str, Any]] = []
        for message in messages:
            changed = dict(message)
            if isinstance(message.get("tool_calls"), list):
                changed["tool_calls"] = calls = []
                for call in message["tool_calls"]:
                    new = self.call_id(str((call.get("function") or {}).get("name")), number)
                    renamed[str(call.get("id"))] = new
                    calls.append({**call, "id": new})
                    number += 1
            if "tool_call_id" in message:
                changed["tool_call_id"] = renamed.get(str(message["tool_call_id"]), message["tool_call_id"])
            result.append(changed)
        return result

    def forced(self, builder: LarkBuilder, tool: Tool) -> str:
        """See CallSyntax."""
        begin, argument, end = (
            mark_expression(builder, self._marks, mark) for mark in (_CALL[0], _ARGUMENTS, _CALL[1])
        )
        number = builder.pattern("[0-9]{1,4}")
        arguments = builder.json(tool.arguments_schema, strict=tool.strict)
        return builder.sequence(begin, builder.text(f"functions.{tool.name}:"), number, argument, arguments, end)

    def around_forced(self, builder: LarkBuilder) -> tuple[str, str]:
        """See CallSyntax."""
        return mark_expression(builder, self._marks, _SECTION[0]), mark_expression(builder, self._marks, _SECTION[1])


class _Counted:
    """Passes arguments on and knows whether there were any."""

    def __init__(self, sink: CallSink) -> None:
        self.any = False
        self._sink = sink

    def emit(self, text: str) -> None:
        self.any = True
        self._sink.arguments(text)
