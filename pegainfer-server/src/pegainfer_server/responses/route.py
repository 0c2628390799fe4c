"""The route of the Responses API.

Owns what a response says about its request, and the order of a stream. Input is `chat_request.py`'s, output `writer.py`'s.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pegainfer_server.body import read_body
from pegainfer_server.chat_run import ChatRun, begin_chat, model_thinks
from pegainfer_server.disconnect import unless_client_leaves
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.openapi import body_docs
from pegainfer_server.responses.body import ResponsesBody
from pegainfer_server.responses.chat_request import chat_fields
from pegainfer_server.responses.writer import ResponseWriter
from pegainfer_server.sse import EventStream, named_event
from pegainfer_server.state import ServerState
from pegainfer_server.system import served_name


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The route, for `create_app`."""
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=body_docs(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answer input items."""
        arrival = time.perf_counter()
        state.serving()
        body = await read_body(request, ResponsesBody, state.max_body_bytes)
        model = served_name(state, body.model)
        response_id = f"resp_{uuid.uuid4().hex}"
        run = await begin_chat(chat_fields(body, thinks=model_thinks(state)), state, metrics, response_id, arrival)
        writer = ResponseWriter(_head(response_id, model, body, run), hide_thinking=bool(body.include))
        if not body.stream:
            return await unless_client_leaves(request, _whole(run, writer))
        return EventStream(
            _events(run, writer),
            last_words=lambda error: b"".join(map(named_event, writer.failed(error.code, error.message))),
        )

    return routes


async def _whole(run: ChatRun, writer: ResponseWriter) -> Response:
    async with aclosing(run.events()) as steps:
        async for events in steps:
            for event in events:
                writer.push(event)
    return Response(msgspec.json.encode(writer.response(run.usage)), media_type="application/json")


async def _events(run: ChatRun, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    told = writer.begin()
    async with aclosing(run.events()) as steps:
        async for events in steps:
            told += [item for event in events for item in writer.push(event)]
            yield b"".join(map(named_event, told))
            told = []
    yield b"".join(map(named_event, writer.end(run.usage)))


def _head(response_id: str, model: str, body: ResponsesBody, run: ChatRun) -> dict[str, Any]:
    text = None if body.text is None or body.text.format is None else body.text.format
    reasoning = body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": run.params.temperature,
        "top_p": run.params.top_p,
        "tools": body.tools,
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)},
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": body.served_tier.get("service_tier", "default"),
        "metadata": body.metadata,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "usage": None,
    }
