"""The routes of Anthropic's API.

Owns the order of a stream and how errors are worded here. Input is `chat_request.py`'s, output `writer.py`'s.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pegainfer_server.body import read_body
from pegainfer_server.chat_run import ChatRun, begin_chat, count_prompt, model_thinks
from pegainfer_server.disconnect import unless_client_leaves
from pegainfer_server.http_errors import anthropic_error
from pegainfer_server.messages_api.body import CountBody, MessagesBody
from pegainfer_server.messages_api.chat_request import chat_fields, generation_fields
from pegainfer_server.messages_api.writer import MessageWriter
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.openapi import body_docs
from pegainfer_server.sse import EventStream, named_event
from pegainfer_server.state import ServerState
from pegainfer_server.system import served_name


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The routes, for `create_app`."""
    routes = APIRouter()

    @routes.post("/v1/messages", openapi_extra=body_docs(MessagesBody))
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.perf_counter()
        state.serving()
        body = await read_body(request, MessagesBody, state.max_body_bytes)
        model = served_name(state, body.model)
        message_id = f"msg_{uuid.uuid4().hex}"
        run = await begin_chat(generation_fields(body, thinks=model_thinks(state)), state, metrics, message_id, arrival)
        head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        writer = MessageWriter(head, show_thinking=body.thinking is None or body.thinking.display != "omitted")
        if not body.stream:
            return await unless_client_leaves(request, _whole(run, writer))
        return EventStream(_events(run, writer), last_words=lambda error: named_event(anthropic_error(error)))

    @routes.post("/v1/messages/count_tokens", openapi_extra=body_docs(CountBody))
    async def count_tokens(request: Request) -> Response:
        """The length of the prompt that a conversation would be."""
        state.serving()
        body = await read_body(request, CountBody, state.max_body_bytes)
        served_name(state, body.model)
        return JSONResponse({"input_tokens": await count_prompt(chat_fields(body, thinks=model_thinks(state)), state)})

    return routes


async def _whole(run: ChatRun, writer: MessageWriter) -> Response:
    async with aclosing(run.events()) as steps:
        async for events in steps:
            for event in events:
                writer.push(event)
    return Response(msgspec.json.encode(writer.message(run.usage)), media_type="application/json")


async def _events(run: ChatRun, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(run.events()) as steps:
        async for events in steps:
            told = [] if begun else writer.begin(run.usage)  # the first output tells what was cached
            begun = True
            told += [item for event in events for item in writer.push(event)]
            if told:
                yield b"".join(map(named_event, told))
    yield b"".join(map(named_event, writer.end(run.usage)))
