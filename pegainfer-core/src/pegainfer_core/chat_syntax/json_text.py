"""JSON values read from a text that grows, in the words in which the model wrote them.

Owns where a value ends. Knows nothing of calls, and does not check what is inside: a model's broken JSON is passed on as it is.
"""

from __future__ import annotations

import json
import re

from pegainfer_core.chat_syntax.source import SPACE, Emit, TextSource, Waiting, ignore

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


def read_string(source: TextSource) -> Waiting[str | None]:
    """A string's value; None if there is none here, it is broken, or the text ends in it."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from _string(source, parts.append)):
        return None
    try:
        value = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    assert isinstance(value, str)
    return value


def read_value(source: TextSource, emit: Emit = ignore) -> Waiting[bool]:
    """Emit the next value's text as it comes; False if the text ends in it."""
    first = yield from source.peek()
    if first == '"':
        return (yield from _string(source, emit))
    if first in ("{", "["):
        return (yield from _nested(source, emit))
    while (character := (yield from source.peek())) not in ("", ",", "}", "]") and character not in SPACE:
        emit(source.take(1))
    return character != ""


def _string(source: TextSource, emit: Emit) -> Waiting[bool]:
    emit(source.take(1))
    while True:
        found = yield from _plain_up_to(source, _IN_STRING, emit)
        if not found:
            return False
        if found == '"':
            emit(source.take(1))
            return True
        while source.unread < 2:  # a backslash and what it escapes
            if not (yield from source.more()):
                emit(source.take(source.unread))
                return False
        emit(source.take(2))


def _nested(source: TextSource, emit: Emit) -> Waiting[bool]:
    depth = 0
    while True:
        found = yield from _plain_up_to(source, _OUTSIDE, emit)
        if not found:
            return False
        if found == '"':
            if not (yield from _string(source, emit)):
                return False
            continue
        depth += 1 if found in "{[" else -1
        emit(source.take(1))
        if depth == 0:
            return True


def _plain_up_to(source: TextSource, wanted: re.Pattern[str], emit: Emit) -> Waiting[str]:
    """Emit text before the first wanted character, which is returned and stays unread; empty at the end of the text."""
    while True:
        plain = source.length_before(wanted)
        if plain:
            emit(source.take(plain))
        if source.unread:
            return (yield from source.peek())
        if not (yield from source.more()):
            return ""
