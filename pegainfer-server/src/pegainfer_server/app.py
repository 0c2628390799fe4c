"""The HTTP application: which routes there are and what surrounds them.

Owns `create_app`. Starts and stops nothing: the lifecycle (binding, loading, signals) is `serve.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import pegainfer_core
from fastapi import FastAPI
from pegainfer_core.client import EngineClient
from starlette.middleware.cors import CORSMiddleware

from pegainfer_server import chat, completions, probes, system, tokenization, web_ui
from pegainfer_server.error_handlers import add_error_handlers
from pegainfer_server.messages_api import route as messages
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.middleware import Gate
from pegainfer_server.openapi import describe
from pegainfer_server.responses import route as responses
from pegainfer_server.state import ServerState

AddRoutes = Callable[[FastAPI, EngineClient], None]


def create_app(state: ServerState, add_routes: AddRoutes | None = None) -> FastAPI:
    """The application that serves `state`; `add_routes` lets plugins add theirs after the server's own."""
    app = FastAPI(title="pegainfer", version=pegainfer_core.__version__)
    metrics = ServerMetrics(state)
    state.client.on_step.append(metrics.on_step)
    describe(app, model_names=state.model_names, needs_key=bool(state.api_keys))
    add_error_handlers(app)
    app.add_middleware(Gate, state=state, metrics=metrics)
    if state.allowed_origins:  # outermost: a browser must be able to read a refusal too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.include_router(probes.router(state))
    app.include_router(system.router(state, metrics))
    app.include_router(completions.router(state, metrics))
    app.include_router(chat.router(state, metrics))
    app.include_router(responses.router(state, metrics))
    app.include_router(messages.router(state, metrics))
    app.include_router(tokenization.router(state))
    if state.ui:
        app.include_router(web_ui.router())
    if add_routes is not None:
        add_routes(app, state.client)
    return app
