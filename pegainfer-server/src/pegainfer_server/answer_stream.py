"""Engine outputs of one chat choice to typed events: detokenizing, telling thinking and calls apart, stop strings of the answer.

Owns where a stop string may match (the answer's text; thinking too if asked for) and how an answer with calls ends. What the events are
is `pegainfer_core.chat_events`; their wording is the routes'. Invariant: as `text_stream`, nothing depends on how steps grouped the tokens.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from pegainfer_core.chat_events import AnswerEvent, ContentDelta, ReasoningDelta
from pegainfer_core.chat_syntax import AnswerParser
from pegainfer_core.messages import RequestOutput

from pegainfer_server.text_stream import IncrementalText, PlacedLogprob, StopMatcher, TextDelta


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What may end a choice besides the engine."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    in_reasoning: bool = False
    """Whether a stop string may also end it while it thinks."""
    min_tokens: int = 0
    named_call: bool = False
    """The request named the function to call: such an answer ends with reason stop, as in the OpenAI API."""


class AnswerStream:
    """One choice as it grows. Feed it every output in order; after a delta with a finish reason it is spent."""

    def __init__(self, detokenizer: IncrementalText, parser: AnswerParser, rules: StopRules) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self._rules = rules
        self._matcher = StopMatcher(rules.stops)
        self._pending = ""  # told by the parser, not released: may begin a stop string
        self._pending_kind: type[ContentDelta | ReasoningDelta] = ContentDelta
        self._fed = 0  # characters given to the parser
        self._entries: deque[PlacedLogprob] = deque()  # of tokens whose text is not released
        self._num_tokens = 0
        self._num_reasoning_tokens = 0

    def push(self, output: RequestOutput) -> TextDelta:
        """The events that `output` makes certain. The caller handles the finish reasons abort, error and rejected."""
        delta = TextDelta(events=[])
        for index, token_id in enumerate(output.token_ids):
            if output.logprobs is not None:
                self._entries.append(PlacedLogprob(output.logprobs[index], self._fed))
            self._num_tokens += 1
            delta.token_ids.append(token_id)
            if self._grow(self._detokenizer.push((token_id,)), delta):
                return self._told(delta)
        if output.finish_reason is not None and not self._grow(self._detokenizer.flush(), delta, is_token=False):
            self._finish(delta, output)
        delta.num_tokens = max(self._num_tokens, output.num_output_tokens)
        return self._told(delta)

    def _grow(self, text: str, delta: TextDelta, *, is_token: bool = True) -> bool:
        """More decoded text; True if it ended the choice."""
        thought = self._parser.in_reasoning
        self._fed += len(text)
        events = self._parser.push(text)
        if is_token and (thought or self._parser.in_reasoning):
            self._num_reasoning_tokens += 1
        if self._take(events, delta):
            return True
        if not self._parser.ended:
            return False
        self._release(len(self._pending), delta)
        self._end(delta, "stop", None)
        return True

    def _take(self, events: Sequence[AnswerEvent], delta: TextDelta) -> bool:
        for event in events:
            if not isinstance(event, ContentDelta | ReasoningDelta):
                self._release(len(self._pending), delta)
                delta.add(event)
            elif self._take_text(event.text, type(event), delta):
                return True
        self._release_entries(delta)
        return False

    def _take_text(self, text: str, kind: type[ContentDelta | ReasoningDelta], delta: TextDelta) -> bool:
        if kind is not self._pending_kind:
            self._release(len(self._pending), delta)
            self._pending_kind = kind
        seen = len(self._pending)
        self._pending += text
        if not self._rules.stops or (kind is ReasoningDelta and not self._rules.in_reasoning):
            self._release(len(self._pending), delta)
            return False
        match = self._matcher.find(self._pending, seen) if self._num_tokens > self._rules.min_tokens else None
        if match is None:
            self._release(len(self._pending) - self._matcher.held_back(self._pending), delta)
            return False
        begin, end, stop = match
        cut = end if self._rules.include_stop else begin
        after = self._fed - self._parser.undecided - (len(self._pending) - cut)
        self._entries = deque(entry for entry in self._entries if entry.offset < after)
        self._pending = self._pending[:cut]
        self._release(cut, delta)
        self._end(delta, "stop", stop)
        return True

    def _finish(self, delta: TextDelta, output: RequestOutput) -> None:
        events = self._parser.finish(cut=output.finish_reason == "length")
        if self._take(events, delta):
            return
        self._release(len(self._pending), delta)
        self._end(delta, output.finish_reason or "stop", output.stop_token_id)

    def _end(self, delta: TextDelta, reason: str, stop: str | int | None) -> None:
        delta.logprobs.extend(self._entries)
        self._entries.clear()
        called = reason == "stop" and self._parser.num_calls > 0 and not self._rules.named_call
        delta.finish_reason, delta.stop_reason = ("tool_calls" if called else reason), stop
        delta.num_tokens = self._num_tokens

    def _release(self, length: int, delta: TextDelta) -> None:
        if length:
            delta.add(self._pending_kind(self._pending[:length]))
            self._pending = self._pending[length:]

    def _release_entries(self, delta: TextDelta) -> None:
        """Logprobs of tokens whose text begins before everything that is still held."""
        held = self._parser.undecided + len(self._pending)
        while self._entries and (self._entries[0].offset < self._fed - held or not held):
            delta.logprobs.append(self._entries.popleft())

    def _told(self, delta: TextDelta) -> TextDelta:
        delta.num_reasoning_tokens = self._num_reasoning_tokens
        return delta
