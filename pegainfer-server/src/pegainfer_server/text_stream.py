"""Engine outputs of one choice to text: detokenizing, stop strings, and which logprobs belong to which text.

Owns the decision that a stop string ended a choice; the caller then leaves the engine's stream, which aborts the request. Knows nothing
of HTTP. Invariant: the joined text, the reason and the logprobs depend on the tokens only, never on how steps grouped them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

from pegainfer_core.chat_events import AnswerDone, AnswerEvent, AnswerReason, ContentDelta
from pegainfer_core.messages import RequestOutput, TokenLogprob


class IncrementalText(Protocol):
    """What is needed of `pegainfer_core.tokenizer.Detokenizer`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """New text, never ending inside a character."""

    def flush(self) -> str:
        """The rest, at the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedLogprob:
    """Logprobs of one token and where its text begins."""

    entry: TokenLogprob
    offset: int
    """Characters of the choice's text before this token."""


@dataclasses.dataclass(slots=True)
class TextDelta:
    """What one engine output adds to a choice."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PlacedLogprob] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    """stop, length or tool_calls, with the last delta."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; None for EOS and length."""
    num_tokens: int = 0
    """Tokens generated so far: what usage reports."""
    events: list[AnswerEvent] | None = None
    """Of a chat: all that is told, in order, but the end. `text` is then what of it is content."""
    num_reasoning_tokens: int = 0
    """How many of the tokens so far were thinking."""

    def add(self, event: AnswerEvent) -> None:
        """One more event of a chat."""
        if isinstance(event, ContentDelta):
            self.text += event.text
        assert self.events is not None
        self.events.append(event)

    @property
    def is_text(self) -> bool:
        """Whether there is nothing in it but text."""
        return not self.events or all(isinstance(event, ContentDelta) for event in self.events)

    def answer_events(self) -> list[AnswerEvent]:
        """What a chat's delta tells, in order; the last event of the last delta is AnswerDone."""
        events: list[AnswerEvent] = [ContentDelta(self.text)] if self.events is None and self.text else []
        events += self.events or ()
        if self.finish_reason is not None:
            events.append(AnswerDone(cast("AnswerReason", self.finish_reason), self.stop_reason))
        return events

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the client yet."""
        return not (self.text or self.token_ids or self.logprobs or self.finish_reason or self.events)


class StopMatcher:
    """Finds the stop string that is completed first; among several completed by the same character, the longest.

    That choice never needs to wait for more text than a possible match itself, and does not depend on chunking.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)

    def find(self, text: str, seen: int) -> tuple[int, int, str] | None:
        """(begin, end, stop) of the first match that ends after the first `seen` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = text.find(stop, max(0, seen - len(stop) + 1))
            if begin >= 0:
                end = begin + len(stop)
                if best is None or (end, begin) < (best[1], best[0]):
                    best = (begin, end, stop)
        return best

    def held_back(self, text: str) -> int:
        """How many characters at the end of `text` may still turn out to begin a stop string."""
        longest = 0
        for stop in self._stops:
            begin = max(0, len(text) - len(stop) + 1)
            while (begin := text.find(stop[0], begin)) >= 0 and len(text) - begin > longest:
                if stop.startswith(text[begin:]):
                    longest = len(text) - begin
                    break
                begin += 1
        return longest


class TextStream:
    """One choice's text as it grows. Feed it every output in order; after a delta with a finish reason it is spent."""

    def __init__(
        self,
        detokenizer: IncrementalText,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        offset: int = 0,
    ) -> None:
        """`offset`: characters of the choice's text that precede the generated text (echo)."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pending = ""  # decoded, not yet released: may begin a stop string
        self._released = offset  # offset of the first character of _pending
        self._entries: deque[PlacedLogprob] = deque()  # of tokens whose text is not released
        self._num_tokens = 0

    def push(self, output: RequestOutput) -> TextDelta:
        """The text that `output` makes certain. The caller handles the finish reasons abort, error and rejected."""
        if self._matcher is None and output.logprobs is None:
            return self._push_plain(output)
        delta = TextDelta()
        for index, token_id in enumerate(output.token_ids):
            if output.logprobs is not None:
                place = self._released + len(self._pending)
                self._entries.append(PlacedLogprob(output.logprobs[index], place))
            self._num_tokens += 1
            delta.token_ids.append(token_id)
            if self._grow(self._detokenizer.push((token_id,)), delta):
                return delta
        if output.finish_reason is not None and not self._grow(self._detokenizer.flush(), delta):
            self._finish(delta, output)
        delta.num_tokens = max(self._num_tokens, output.num_output_tokens)
        return delta

    def _push_plain(self, output: RequestOutput) -> TextDelta:
        self._num_tokens += len(output.token_ids)
        text = self._detokenizer.push(output.token_ids) if output.token_ids else ""
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        self._released += len(text)
        return TextDelta(
            text=text,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_token_id,
            num_tokens=max(self._num_tokens, output.num_output_tokens),
        )

    def _grow(self, text: str, delta: TextDelta) -> bool:
        """Append decoded text and release what is certain; True if a stop string ended the choice."""
        if self._matcher is None:
            self._pending += text
            self._release(len(self._pending), delta)
            return False
        seen = len(self._pending)
        self._pending += text
        match = self._matcher.find(self._pending, seen) if text and self._num_tokens > self._min_tokens else None
        if match is None:
            self._release(len(self._pending) - self._matcher.held_back(self._pending), delta)
            return False
        begin, end, stop = match
        cut = end if self._include_stop else begin
        stop_at = self._released + cut
        self._pending = self._pending[:cut]
        self._entries = deque(entry for entry in self._entries if entry.offset < stop_at)
        self._release(cut, delta)
        delta.finish_reason, delta.stop_reason, delta.num_tokens = "stop", stop, self._num_tokens
        return True

    def _finish(self, delta: TextDelta, output: RequestOutput) -> None:
        self._release(len(self._pending), delta)
        delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_token_id

    def _release(self, length: int, delta: TextDelta) -> None:
        """Move the first `length` pending characters, and the logprobs of tokens that begin there, to `delta`."""
        delta.text += self._pending[:length]
        self._pending = self._pending[length:]
        self._released += length
        while self._entries and (self._entries[0].offset < self._released or not self._pending):
            delta.logprobs.append(self._entries.popleft())
