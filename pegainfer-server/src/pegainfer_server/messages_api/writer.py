"""An assistant's answer as content blocks and stream events of Anthropic's API.

Owns their shapes and their order: thinking, text and each tool call are blocks of their own, and one is complete before the next begins.
Knows nothing of requests or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pegainfer_core.chat_events import (
    AnswerDone,
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)

Json = dict[str, Any]


class MessageWriter:
    """One message. Call `begin`, then `push` for each event, then `end`; each returns stream events."""

    def __init__(self, head: Mapping[str, Any], *, show_thinking: bool) -> None:
        """`head`: what the message says beside its content."""
        self._head = head
        self._show_thinking = show_thinking
        self._parts: list[Json] = []
        self._open: Json | None = None
        self._arguments = ""
        self._done = AnswerDone("stop")

    def begin(self, usage: Mapping[str, Any]) -> list[Json]:
        """The first event."""
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return [{"type": "message_start", "message": message}]

    def push(self, event: AnswerEvent) -> list[Json]:
        """The events that tell of `event`."""
        match event:
            case ContentDelta(text):
                return self._grow("text", text)
            case ReasoningDelta(text):
                return self._grow("thinking", text) if self._show_thinking else []
            case ToolCallStart():
                self._arguments = ""
                begun = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return [*self._close(), *self._start(begun)]
            case ToolArgumentsDelta():
                self._arguments += event.text
                return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
            case AnswerDone():
                self._done = event
                return self._close()

    def end(self, usage: Mapping[str, Any]) -> list[Json]:
        """The last events."""
        ending = {"type": "message_delta", "delta": self._ending(), "usage": _usage(usage)}
        return [ending, {"type": "message_stop"}]

    def message(self, usage: Mapping[str, Any]) -> Json:
        """The whole message, after the last event."""
        return {**self._head, "content": self._parts, **self._ending(), "usage": _usage(usage)}

    def _ending(self) -> Json:
        reason, stop = self._done.finish_reason, self._done.stop_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(part["type"] == "tool_use" for part in self._parts):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _grow(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            events = [*self._close(), *self._start({"type": kind, kind: "", **signed})]
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _start(self, part: Json) -> list[Json]:
        self._open = part
        return [{"type": "content_block_start", "index": len(self._parts), "content_block": dict(part)}]

    def _delta(self, delta: Json) -> Json:
        assert self._open is not None, "a delta belongs to a part"
        return {"type": "content_block_delta", "index": len(self._parts), "delta": delta}

    def _close(self) -> list[Json]:
        part = self._open
        if part is None:
            return []
        if part["type"] == "tool_use":
            part["input"] = _parsed(self._arguments)
        index = len(self._parts)
        self._parts.append(part)
        self._open = None
        return [{"type": "content_block_stop", "index": index}]


def _parsed(arguments: str) -> Json:
    """Arguments as an object; empty for a call that was cut off, which `stop_reason` tells."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Mapping[str, Any]) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "service_tier": "standard",
    }
