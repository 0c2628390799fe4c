"""Chat completions as the OpenAI API words them: a message, or its deltas.

Owns the wording of events: content, reasoning, tool calls. Which events there are is `answer_stream.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegainfer_core.chat_events import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ReasoningField,
    ToolArgumentsDelta,
    ToolCallStart,
)
from pegainfer_core.tokenizer import Tokenizer

from pegainfer_server.answer import Shape
from pegainfer_server.generation import Choice
from pegainfer_server.logprobs import TokenWriter
from pegainfer_server.protocol import ChatBody
from pegainfer_server.text_stream import TextDelta


class ChatShape(Shape):
    """Choices of chat completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, reasoning_field: ReasoningField) -> None:
        self._body = body
        self._writer = TokenWriter(tokenizer, as_ids=body.return_tokens_as_token_ids)
        both = ("reasoning_content", "reasoning")
        fields = both if reasoning_field == "both" else (reasoning_field,)
        self._reasoning_fields = fields if body.include_reasoning else ()

    @property
    def text_only(self) -> bool:
        """See Shape."""
        return not self._body.logprobs and not self._body.return_token_ids

    def whole(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """See Shape."""
        events = delta.answer_events()
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = _whole_calls(events)
        content = None if not delta.text and (reasoning or calls) else delta.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= dict.fromkeys(self._reasoning_fields, reasoning)
        if calls:
            message["tool_calls"] = calls
        data = {"index": choice.index, "message": message, "logprobs": self._logprobs(delta)}
        return data | self._ending(delta) | self._ids(delta, choice)

    def beside(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See Shape: the prompt's logprobs, which all choices share."""
        entries = choices[0].prompt_logprobs
        if entries is None or self._body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self._writer.prompt_entries(entries, self._body.prompt_logprobs)}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """See Shape."""
        nothing = TextDelta()
        data = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return data | self._ending(nothing) | self._ids(nothing, choice)

    def chunks(self, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        """See Shape. One chunk for each event; logprobs and token ids come with the first; the finish reason has one of its own."""
        nothing = TextDelta()
        beside = {"logprobs": self._logprobs(delta)} | self._ending(nothing) | self._ids(delta)
        later = {"logprobs": None} | self._ending(nothing) | self._ids(nothing)
        result: list[dict[str, Any]] = []
        for event in delta.answer_events():
            if (wording := self._delta_of(event)) is not None:
                result.append({"index": choice.index, "delta": wording} | (later if result else beside))
        if not result and (delta.logprobs or (delta.token_ids and self._body.return_token_ids)):
            result.append({"index": choice.index, "delta": {}} | beside)
        if delta.finish_reason is not None:
            result.append({"index": choice.index, "delta": {}, "logprobs": None} | self._ending(delta))
        return result

    def _delta_of(self, event: AnswerEvent) -> dict[str, Any] | None:
        """The delta object for one event; None for what is told otherwise or not at all."""
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return dict.fromkeys(self._reasoning_fields, event.text) or None
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        if isinstance(event, ToolArgumentsDelta):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None

    def _ending(self, delta: TextDelta) -> dict[str, Any]:
        return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _ids(self, delta: TextDelta, with_prompt_of: Choice | None = None) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": delta.token_ids}
        if with_prompt_of is not None:
            ids["prompt_token_ids"] = list(with_prompt_of.request.prompt_ids)
        return ids

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [self._writer.chat_entry(placed.entry) for placed in delta.logprobs], "refusal": None}


def _whole_calls(events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, ToolArgumentsDelta):
            calls[event.index]["function"]["arguments"] += event.text
    return calls
