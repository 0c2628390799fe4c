"""POST /v1/chat/completions: messages in, one assistant message per choice out.

Owns the route. What the request means is `chat_choices.py`'s, the wording of answers `chat_shape.py`'s.
"""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pegainfer_server.answer import Answer, new_id
from pegainfer_server.body import read_body
from pegainfer_server.chat_choices import chat_choices
from pegainfer_server.chat_shape import ChatShape
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.openapi import body_docs
from pegainfer_server.protocol import ChatBody
from pegainfer_server.state import ServerState
from pegainfer_server.system import served_name


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The route, for `create_app`."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_docs(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.perf_counter()
        _, tokenizer = state.serving()
        body = await read_body(request, ChatBody, state.max_body_bytes)
        model = served_name(state, body.model)
        response_id = new_id(ChatShape)
        choices = await chat_choices(body, state, metrics, response_id, arrival)
        shape = ChatShape(body, tokenizer, state.reasoning_field)
        return await Answer(response_id, model, body, shape, choices, state.client, arrival).respond(request)

    return routes
