"""Calls as Gemma 4 writes them: an object of its own notation, whose strings stand between special tokens.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Owns that syntax and its translation to JSON while it comes. The notation says what is a string, so the tool's schema is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegainfer_core.chat_syntax.arguments import escaped, parse_json, quoted
from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.source import Emit, Finder, Pattern, TextSource, Waiting, ignore
from pegainfer_core.chat_syntax.syntax import CallSink, CallSyntax, Tool, Tools, mark_expression
from pegainfer_core.structured import LarkBuilder

_NAME = re.compile(r"[^\s{}]+")
_CALL = ("<|tool_call>", "<tool_call|>")
_QUOTE = '<|"|>'
_DEPTH = 64  # of nested values; what lies deeper is left out


class GemmaCalls(CallSyntax):
    """The syntax."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._open, self._close = marks(_CALL[0]), marks(_CALL[1])
        self._quote = marks(_QUOTE)
        self._end = Finder(Pattern(self._close), Pattern(self._open))
        self._end_of_name = Finder(Pattern("{"), Pattern(self._close))
        self._end_of_string = Finder(Pattern(self._quote))
        self._end_of_key = Finder(Pattern(":"), Pattern("}"), Pattern(self._close))
        self._end_of_word = Finder(Pattern(","), Pattern("}"), Pattern("]"), Pattern(self._close))

    @property
    def openers(self) -> Sequence[Pattern]:
        """See CallSyntax."""
        return [Pattern(self._open, None, "call:")]

    def read(self, source: TextSource, tools: Tools, sink: CallSink) -> Waiting[bool]:
        """See CallSyntax."""
        del tools
        yield from source.expect(self._open, None, "call:")
        name: list[str] = []
        found = yield from source.until(self._end_of_name, name.append)
        if found != 0 or _NAME.fullmatch("".join(name).strip()) is None:
            return False
        sink.start("".join(name).strip())
        yield from self._read_object(source, sink.arguments, _DEPTH)
        if (yield from source.until(self._end, ignore)) == 0:
            source.take(len(self._close))
        sink.end()
        return True

    def _read_value(self, source: TextSource, emit: Emit, depth: int) -> Waiting[None]:
        yield from source.skip_space()
        if (yield from source.expect(self._quote)):
            emit('"')
            found = yield from source.until(self._end_of_string, lambda text: emit(escaped(text)))
            if found is not None:
                source.take(len(self._quote))
                emit('"')
            return
        first = yield from source.peek()
        if first == "{" and depth:
            yield from self._read_object(source, emit, depth - 1)
        elif first == "[" and depth:
            yield from self._read_list(source, emit, depth - 1)
        else:
            word: list[str] = []
            found = yield from source.until(self._end_of_word, word.append)
            text = "".join(word).strip()
            if found is not None:
                emit(text if parse_json(text)[0] else quoted(text))

    def _read_object(self, source: TextSource, emit: Emit, depth: int) -> Waiting[None]:
        source.take(1)
        before = "{"
        while not (yield from self._at_end(source, "}")):
            key: list[str] = []
            if (yield from source.expect(self._quote)):
                yield from source.until(self._end_of_string, key.append)
                yield from source.expect(self._quote)
                yield from source.until(self._end_of_key, ignore)
            else:
                yield from source.until(self._end_of_key, key.append)
            if not (yield from source.expect(":")):
                break
            emit(before + quoted("".join(key).strip()) + ": ")
            before = ", "
            yield from self._read_value(source, emit, depth)
        if (yield from source.expect("}")):
            emit("{}" if before == "{" else "}")

    def _read_list(self, source: TextSource, emit: Emit, depth: int) -> Waiting[None]:
        source.take(1)
        emit("[")
        first = True
        while not (yield from self._at_end(source, "]")):
            emit("" if first else ", ")
            first = False
            yield from self._read_value(source, emit, depth)
        if (yield from source.expect("]")):
            emit("]")

    def _at_end(self, source: TextSource, closing: str) -> Waiting[bool]:
        """Take what separates items; whether the end of a list or object, of the call or of the text comes next."""
        yield from source.skip_space()
        while (yield from source.expect(",")):
            yield from source.skip_space()
        following = yield from source.peek()
        return following in ("", closing) or following in "}]" or following == self._close[0]

    def forced(self, builder: LarkBuilder, tool: Tool) -> str:
        """See CallSyntax. Bound are the name and the notation; required arguments must be there, in the order of the schema."""
        opening, closing, quote = (mark_expression(builder, self._marks, written) for written in (*_CALL, _QUOTE))
        string = builder.sequence(
            quote, builder.pattern("(?s:.*)" if self._marks.is_special(_QUOTE) else "[^<]*"), quote
        )
        word = builder.pattern(r"-?[0-9]+(\.[0-9]+)?|true|false|null")
        flat = builder.any_of([string, word])
        items = builder.optional(builder.one_or_more(flat, ","))
        value = builder.any_of([flat, builder.sequence(builder.text("["), items, builder.text("]"))])
        required = list(tool.arguments_schema.get("required") or ())
        members = [builder.sequence(builder.text(f"{name}:"), value) for name in required]
        separated = [part for member in members for part in (builder.text(","), member)][1:]
        others = [name for name in tool.arguments_schema.get("properties") or {} if name not in required]
        if others:
            other = builder.sequence(builder.any_of([builder.text(f"{name}:") for name in others]), value)
            more = builder.one_or_more(other, ",")
            separated.append(builder.optional(builder.sequence(builder.text(","), more) if separated else more))
        return builder.sequence(opening, builder.text(f"call:{tool.name}{{"), *separated, builder.text("}"), closing)
