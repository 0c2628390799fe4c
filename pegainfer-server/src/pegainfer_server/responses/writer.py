"""An assistant's answer as output items and stream events of the Responses API.

Owns their shapes and their order: thinking, text and each tool call are items of their own, and one is complete before the next begins.
A whole answer is what the stream's last event holds. Knows nothing of requests or tokens.
"""

from __future__ import annotations

import uuid
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

from pegainfer_server.responses.chat_request import hidden_thinking

Json = dict[str, Any]


class ResponseWriter:
    """One response. Call `begin`, then `push` for each event, then `end`; each returns stream events."""

    def __init__(self, head: Mapping[str, Any], *, hide_thinking: bool) -> None:
        """`head`: what the response says beside its output; `hide_thinking`: also as encrypted_content."""
        self._head = head
        self._hide_thinking = hide_thinking
        self._output: list[Json] = []
        self._item: Json | None = None
        self._sequence = 0
        self._reason = "stop"

    def begin(self) -> list[Json]:
        """The first events."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def push(self, event: AnswerEvent) -> list[Json]:
        """The events that tell of `event`."""
        match event:
            case ContentDelta(text):
                return self._text("message", text)
            case ReasoningDelta(text):
                return self._text("reasoning", text)
            case ToolCallStart():
                call = {"id": _new_id("fc"), "type": "function_call", "call_id": event.id, "name": event.name}
                return [*self._close(), *self._open({**call, "arguments": ""})]
            case ToolArgumentsDelta():
                assert self._item is not None, "a call's arguments follow its start"
                self._item["arguments"] += event.text
                return [self._item_event("response.function_call_arguments.delta", delta=event.text)]
            case AnswerDone():
                self._reason = event.finish_reason
                return self._close("incomplete" if event.finish_reason == "length" else "completed")

    def end(self, usage: Mapping[str, Any]) -> list[Json]:
        """The last event, with the whole response."""
        response = self.response(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def response(self, usage: Mapping[str, Any]) -> Json:
        """The whole response, after the last event."""
        cut = self._reason == "length"
        response = self._response("incomplete" if cut else "completed")
        details = {"reason": "max_output_tokens"} if cut else None
        return {**response, "incomplete_details": details, "usage": _usage(usage)}

    def failed(self, code: str | None, message: str) -> list[Json]:
        """The last event of a response that failed midway."""
        response = {**self._response("failed"), "error": {"code": code or "server_error", "message": message}}
        return [self._event("response.failed", response=response)]

    # items

    def _text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._item is None or self._item["type"] != kind:
            events = [*self._close(), *self._open(_new_item(kind))]
        assert self._item is not None
        self._item["content"][0]["text"] += text
        if kind == "reasoning":
            return [*events, self._item_event("response.reasoning_text.delta", content_index=0, delta=text)]
        return [*events, self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _open(self, item: Json) -> list[Json]:
        self._item = item
        item["status"] = "in_progress"
        kind = item["type"]
        bare = {**item, "content": []} if kind == "message" else item
        added = self._event("response.output_item.added", output_index=len(self._output), item=_copy(bare))
        if kind == "function_call":
            return [added]
        return [added, self._item_event("response.content_part.added", content_index=0, part=dict(item["content"][0]))]

    def _close(self, status: str = "completed") -> list[Json]:
        item = self._item
        if item is None:
            return []
        events = self._closing(item)
        item["status"] = status
        if item["type"] == "reasoning" and self._hide_thinking:
            item["encrypted_content"] = hidden_thinking(item["content"][0]["text"])
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=_copy(item)))
        self._output.append(item)
        self._item = None
        return events

    def _closing(self, item: Json) -> list[Json]:
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            return [self._item_event("response.function_call_arguments.done", **named)]
        part = dict(item["content"][0])
        if item["type"] == "reasoning":
            done = self._item_event("response.reasoning_text.done", content_index=0, text=part["text"])
        else:
            done = self._item_event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
        return [done, self._item_event("response.content_part.done", content_index=0, part=part)]

    # events

    def _response(self, status: str) -> Json:
        return {**self._head, "status": status, "output": [_copy(item) for item in self._output]}

    def _item_event(self, kind: str, **fields: Any) -> Json:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _new_item(kind: str) -> Json:
    if kind == "reasoning":
        thought = {"type": "reasoning_text", "text": ""}
        return {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": [thought]}
    text: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": [text]}


def _copy(item: Json) -> Json:
    """An item as it stands now: events must not change after they were made."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(usage: Mapping[str, Any]) -> Json:
    thinking = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thinking.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
