"""A text that grows while it is read: the base of every incremental reader of answers.

Owns waiting. Readers are generators: they pause (`yield`) where the text so far cannot decide, and go on when there is more of it or
it has ended. Knows no syntax. Invariant: what a reader does depends on the text only, never on the pieces in which it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""A reader that pauses until there is more text, and returns T."""
Emit = Callable[[str], None]

SPACE: Final = " \t\r\n"
NO_SPACE: Final = re.compile(r"[^ \t\r\n]")
_UNDECIDED: Final = -1


class Pattern:
    """Literals in a row, in which None stands for any whitespace and a tuple for one of several literals (the first that fits).

    An empty literal stands for the end of a text that was not cut off.
    """

    def __init__(self, *parts: str | tuple[str, ...] | None) -> None:
        self._parts = tuple((part,) if isinstance(part, str) else part for part in parts)
        first = self._parts[0] if self._parts else None
        assert first and all(first), "a pattern begins with a literal"
        self.first_characters = frozenset(literal[0] for literal in first)

    def match(self, text: str, at: int, final: bool, cut: bool) -> int | None:
        """Where a match that begins at `at` ends; None for no match; -1 if more text decides, which never comes if `final`."""
        for part in self._parts:
            end = _skip(text, at) if part is None else _literal(part, text, at, final and not cut)
            if end == _UNDECIDED or (part is None and end == len(text) and not final):
                return None if final else _UNDECIDED
            if end is None:
                return None
            at = end
        return at


def _literal(options: Sequence[str], text: str, at: int, may_end: bool) -> int | None:
    if at == len(text):
        return at if may_end and "" in options else _UNDECIDED
    for option in options:
        if option and text.startswith(option, at):
            return at + len(option)
        if option.startswith(text[at:]):
            return _UNDECIDED
    return None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


class Finder:
    """Finds the earliest place where one of several patterns matches."""

    def __init__(self, *patterns: Pattern) -> None:
        self.patterns = patterns
        characters = frozenset[str]().union(*(pattern.first_characters for pattern in patterns))
        self._candidates = re.compile("[" + re.escape("".join(sorted(characters))) + "]") if characters else None

    def search(self, text: str, at: int, final: bool, cut: bool) -> tuple[int, int, int] | None:
        """(begin, end, number of the pattern), earliest first; end is -1 if more text decides about the match at begin."""
        if self._candidates is None:
            return None
        for candidate in self._candidates.finditer(text, at):
            begin = candidate.start()
            for number, pattern in enumerate(self.patterns):
                end = pattern.match(text, begin, final, cut)
                if end is not None:
                    return begin, end, number
        return None


class TextSource:
    """The text and how far it has been read."""

    def __init__(self) -> None:
        self.ended = False
        self.cut = False
        """Whether it ended before the model was done: what is open then stays open."""
        self._text = ""
        self._at = 0
        self._marked: int | None = None

    def feed(self, text: str) -> None:
        """More text came."""
        keep = self._at if self._marked is None else self._marked
        self._text = self._text[keep:] + text
        self._at -= keep
        if self._marked is not None:
            self._marked = 0

    def end(self, *, cut: bool) -> None:
        """No more text will come; `cut` if the model was stopped before it was done."""
        self.ended = True
        self.cut = cut

    @property
    def unread(self) -> int:
        """Characters that no reader has taken yet."""
        return len(self._text) - self._at

    def mark(self) -> None:
        """Remember this place for `rewind`; all text from here on is kept until `forget`."""
        self._marked = self._at

    def rewind(self) -> None:
        """Back to the marked place."""
        assert self._marked is not None
        self._at = self._marked
        self._marked = None

    def forget(self) -> None:
        """The marked place is needed no more."""
        self._marked = None

    def take(self, count: int) -> str:
        """The next `count` characters, which must be there."""
        text = self._text[self._at : self._at + count]
        assert len(text) == count
        self._at += count
        return text

    def take_rest(self) -> str:
        """All that is unread at the end: what may have begun a mark. It is dropped if the text was cut off, and text otherwise."""
        rest = self.take(self.unread)
        return "" if self.cut else rest

    def length_before(self, wanted: re.Pattern[str]) -> int:
        """How many of the unread characters come before the first one that `wanted` finds."""
        found = wanted.search(self._text, self._at)
        return self.unread if found is None else found.start() - self._at

    def more(self) -> Waiting[bool]:
        """Wait for more text; False if there will be none."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Waiting[str]:
        """The next character, not taken; empty at the end."""
        while not self.unread:
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def skip_space(self) -> Waiting[None]:
        """Take whitespace until something else comes."""
        while True:
            self._at = _skip(self._text, self._at)
            if self.unread or not (yield from self.more()):
                return

    def expect(self, *parts: str | tuple[str, ...] | None) -> Waiting[bool]:
        """Take a pattern if the text goes on with it."""
        end = yield from self.looking_at(Pattern(*parts))
        if end is None:
            return False
        self._at = end
        return True

    def looking_at(self, pattern: Pattern) -> Waiting[int | None]:
        """Where in the text so far a pattern that begins here ends; None if the text goes on differently."""
        while True:
            end = pattern.match(self._text, self._at, self.ended, self.cut)
            if end != _UNDECIDED:
                return end
            yield from self.more()

    def cut_within(self, pattern: Pattern) -> bool:
        """Whether the text was cut off in what may have become this pattern."""
        return self.cut and self.unread > 0 and pattern.match(self._text, self._at, False, True) == _UNDECIDED

    def until(self, finder: Finder, emit: Emit, *, held: str = "", most_held: int | None = None) -> Waiting[int | None]:
        """Emit text up to the earliest match, which stays unread; the number of its pattern, or None at the end of the text.

        Characters of `held` (at most `most_held`) right before the match, or before the end, stay unread too, and so does a match that
        the end cut off: the caller decides.
        """
        begun: int | None = None  # where a match may have begun that more text would decide
        while True:
            found = finder.search(self._text, self._at, self.ended, self.cut)
            begin = len(self._text) if found is None else found[0]
            if found is None and self.ended and begun is not None:
                begin = begun
            solid = self._before_held(begin, held, most_held)
            if solid > self._at:
                emit(self.take(solid - self._at))
            if found is not None and found[1] != _UNDECIDED:
                return found[2]
            begun = None if found is None else found[0]
            if not (yield from self.more()):
                return None

    def _before_held(self, end: int, held: str, most: int | None) -> int:
        stop = self._at if most is None else max(self._at, end - most)
        while end > stop and self._text[end - 1] in held:
            end -= 1
        return end


def ignore(text: str) -> None:
    """An `Emit` for text that nobody wants."""
