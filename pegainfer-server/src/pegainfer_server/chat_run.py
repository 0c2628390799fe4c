"""One chat answer as typed events: what the Responses and Anthropic routes word in their own ways.

Owns the running of a translated chat request. Knows no API's shapes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from pegainfer_core.chat_events import AnswerEvent

from pegainfer_server.body import validated
from pegainfer_server.chat_choices import chat_choices
from pegainfer_server.chat_prompt import encode_chat
from pegainfer_server.chat_tools import read_tools
from pegainfer_server.generation import Choice, run_choices, usage
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.protocol import ChatBody
from pegainfer_server.state import ServerState


class ChatRun:
    """One checked chat request. `usage` and `params` may be asked at any time."""

    def __init__(self, choice: Choice, state: ServerState, seconds: float | None) -> None:
        self._choice = choice
        self._client = state.client
        self._seconds = seconds
        self.params = choice.request.params

    async def events(self) -> AsyncGenerator[list[AnswerEvent], None]:
        """The answer; its last event is AnswerDone. Raises ApiError or EngineDeadError; leaving early aborts the request."""
        async with aclosing(run_choices([self._choice], self._client, self._seconds)) as deltas:
            async for _, delta in deltas:
                yield delta.answer_events()

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far, as chat completions tell them."""
        return usage([self._choice])


def model_thinks(state: ServerState) -> bool:
    """Whether answers may hold thinking."""
    return state.chat_format is not None and state.chat_format.thinks


async def begin_chat(
    fields: Mapping[str, Any], state: ServerState, metrics: ServerMetrics, response_id: str, arrival: float
) -> ChatRun:
    """The run of a chat request with these fields of `ChatBody`. Raises ApiError or RequestError naming a field."""
    body = validated(fields, ChatBody)
    (choice,) = await chat_choices(body, state, metrics, response_id, arrival)
    seconds = None if body.timeout is None else body.timeout - (time.perf_counter() - arrival)
    return ChatRun(choice, state, seconds)


async def count_prompt(fields: Mapping[str, Any], state: ServerState) -> int:
    """Tokens of the prompt that these fields of `ChatBody` make. Raises ApiError or RequestError naming a field."""
    info, tokenizer = state.serving()
    body = validated(fields, ChatBody)
    syntax = None if state.chat_format is None else state.chat_format.syntax
    calls = None if syntax is None else syntax.calls
    use = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, syntax=calls)
    trust = state.trust_request_chat_template
    prompt = await encode_chat(body, state.chat_format, tokenizer, info, use.shown, trust_template=trust)
    return len(prompt.ids)
