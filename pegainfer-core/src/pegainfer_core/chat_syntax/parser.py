"""From an answer's text to typed events: thinking, content and tool calls told apart while the text comes.

Owns the order of an answer's parts and the spaces between them. What marks thinking and how calls are written is a `ChatSyntax`'s. Knows
nothing of tokens. Invariant: joined per kind, the events depend on the text only, never on how it was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from pegainfer_core.chat_events import AnswerEvent, ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from pegainfer_core.chat_syntax.source import NO_SPACE, SPACE, Finder, Pattern, TextSource, Waiting
from pegainfer_core.chat_syntax.syntax import CallSink, ChatSyntax, Tool

Start = Literal["undecided", "thinking", "mid-thought", "answer"]
"""Where the prompt leaves the model: free to begin with thinking, just inside thinking, amid a sentence of it, or in its answer."""


def start_after(syntax: ChatSyntax, prompt: str, continued: str | None) -> Start:
    """Where a rendered prompt leaves the model. Only its end counts: what users write elsewhere opens and closes nothing.

    `continued`: the text of the assistant's message that is to be continued, if one is.
    """
    reasoning = syntax.reasoning
    if reasoning is None:
        return "answer"
    if continued is not None:
        return "mid-thought" if continued.rfind(reasoning.opening) > continued.rfind(reasoning.closing) else "answer"
    tail = prompt.rstrip()
    if tail.endswith((reasoning.opening, reasoning.opening + reasoning.label)):
        return "thinking"
    return "answer" if tail.endswith(reasoning.closing) else "undecided"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParserSettings:
    """What a request asks of its answers."""

    start: Start = "undecided"
    tools: Mapping[str, Tool] | None = None
    """None: calls are not looked for."""
    max_calls: int | None = None
    """The answer ends with this call."""
    calls_before: int = 0
    """Calls in the dialogue so far."""
    show_special: bool = False
    """Write special tokens out where they stand for nothing."""


class AnswerParser:
    """One answer. Feed it text in order, then `finish`; it takes special tokens as the characters of its syntax's `Marks`."""

    def __init__(self, syntax: ChatSyntax, settings: ParserSettings) -> None:
        self.in_reasoning = settings.start in ("thinking", "mid-thought")
        """Whether the text read last was thinking."""
        self.num_calls = 0
        """Calls that have begun."""
        self.ended = False
        """Whether the answer is over although the model may go on: its last allowed call is complete."""
        self._syntax = syntax
        self._settings = settings
        self._clean = syntax.marks.cleaner(show=settings.show_special)
        self._calls = syntax.calls if settings.tools is not None else None
        self._openers = () if self._calls is None else tuple(self._calls.openers)
        self._events: list[AnswerEvent] = []
        self._source = TextSource()
        self._done = False
        self._run = self._answer()
        next(self._run)

    @property
    def undecided(self) -> int:
        """Characters taken that no event tells of yet."""
        return self._source.unread

    def push(self, text: str) -> list[AnswerEvent]:
        """What `text` makes certain."""
        if not self.ended:
            self._source.feed(text)
            self._resume()
        return self._drained()

    def finish(self, *, cut: bool) -> list[AnswerEvent]:
        """The rest; `cut` if the model was stopped before it was done, so that an unfinished call is no text of the answer."""
        if not self.ended:
            self._source.end(cut=cut)
            self._resume()
        return self._drained()

    def _resume(self) -> None:
        if not self._done:
            self._done = next(self._run, "done") == "done"

    def _drained(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events

    # the answer's parts

    def _answer(self) -> Waiting[None]:
        yield  # the constructor's next()
        start, reasoning = self._settings.start, self._syntax.reasoning
        if reasoning is not None and start == "undecided":
            at_begin = Pattern(*(part for part in (reasoning.open, reasoning.label) if part))
            if (yield from self._after_space(at_begin)):
                yield from self._reasoning()
        elif reasoning is not None and start in ("thinking", "mid-thought"):
            yield from self._thoughts(strip=start == "thinking")
        thinking = [] if reasoning is None or not reasoning.anywhere else [Pattern(reasoning.open)]
        finder = Finder(*self._openers, *thinking)
        while (found := (yield from self._content_until(finder))) is not None:
            if found < len(self._openers):
                yield from self._call()
            else:
                yield from self._reasoning()

    def _after_space(self, pattern: Pattern) -> Waiting[bool]:
        """Whether whitespace and then the pattern comes; the whitespace is taken only then."""
        source = self._source
        source.mark()
        yield from source.skip_space()
        if (yield from source.looking_at(pattern)) is None:
            if source.cut_within(pattern):
                source.take_rest()
                source.forget()
            else:
                source.rewind()
            return False
        source.forget()
        return True

    def _reasoning(self) -> Waiting[None]:
        """Thinking whose opening mark is unread, spaces before it included."""
        reasoning = self._syntax.reasoning
        assert reasoning is not None
        self.in_reasoning = True
        yield from self._source.skip_space()
        yield from self._source.expect(reasoning.open)
        if reasoning.label:
            has_label = yield from self._source.expect(reasoning.label)
            if not has_label and self._source.cut_within(Pattern(reasoning.label)):
                self._source.take_rest()
        yield from self._thoughts(strip=True)

    def _thoughts(self, *, strip: bool) -> Waiting[None]:
        """Thinking up to its end: its closing mark, or a call, which some models begin without one."""
        reasoning, source = self._syntax.reasoning, self._source
        assert reasoning is not None
        if strip:
            yield from source.skip_space()
        finder = Finder(Pattern(reasoning.close), *self._openers)
        found = yield from source.until(finder, self._tell_reasoning, held=SPACE)
        if found is None:
            self._tell_reasoning(self._tail().rstrip())
            return
        yield from source.skip_space()
        if found == 0:
            source.take(len(reasoning.close))
        self.in_reasoning = False
        yield from source.skip_space()

    def _content_until(self, finder: Finder) -> Waiting[int | None]:
        """Content up to what `finder` finds; spaces before that stay unread, spaces at the end are content."""
        source = self._source
        found = yield from source.until(finder, self._tell_content, held=SPACE if finder.patterns else "")
        if found is None:
            self._tell_content(self._tail())
        return found

    def _tail(self) -> str:
        """What is left at the end: spaces, and perhaps what may have begun a mark, which is dropped if the text was cut off there."""
        source = self._source
        spaces = source.take(min(source.unread, source.length_before(NO_SPACE)))
        return spaces + source.take_rest()

    def _call(self) -> Waiting[None]:
        """A call, or several, whose opener is unread, spaces before it included. What turns out to be none is content."""
        assert self._calls is not None
        source = self._source
        source.mark()
        yield from source.skip_space()
        is_call = yield from self._calls.read(source, self._settings.tools or {}, _Sink(self))
        if is_call:
            source.forget()
            if source.ended:  # the beginning of its closing mark
                source.take(source.unread)
            yield from source.skip_space()
        elif source.cut:  # else it would have been found out before the end
            source.take_rest()
            source.forget()
        else:
            source.rewind()
            self._tell_content(source.take(source.length_before(NO_SPACE) + 1))

    # what is told

    def _tell_content(self, text: str) -> None:
        text = self._clean(text)
        if not text or self.ended:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ContentDelta):
            self._events[-1] = ContentDelta(last.text + text)
        else:
            self._events.append(ContentDelta(text))

    def _tell_reasoning(self, text: str) -> None:
        text = self._clean(text)
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + text)
        else:
            self._events.append(ReasoningDelta(text))

    def begin_call(self, name: str) -> None:
        """For the sink of calls."""
        if self.ended:
            return
        assert self._calls is not None
        name = self._clean(name)
        self._source.forget()
        call_id = self._calls.call_id(name, self._settings.calls_before + self.num_calls)
        self._events.append(ToolCallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def tell_arguments(self, text: str) -> None:
        """For the sink of calls."""
        text = self._clean(text)
        if not text or self.ended:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolArgumentsDelta):
            self._events[-1] = ToolArgumentsDelta(last.index, last.text + text)
        else:
            self._events.append(ToolArgumentsDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        """For the sink of calls."""
        if self.num_calls == self._settings.max_calls:
            self.ended = True


class _Sink(CallSink):
    """Passes calls on to the parser."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def start(self, name: str) -> None:
        self._parser.begin_call(name)

    def arguments(self, text: str) -> None:
        self._parser.tell_arguments(text)

    def end(self) -> None:
        self._parser.end_call()
