"""What surrounds every route: API keys, X-Request-Id, HTTP metrics, and a last net for what nobody foresaw.

Owns the outermost layer, as plain ASGI so that streams and disconnects pass through untouched. Knows nothing of what routes do.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegainfer_server.http_errors import ApiError, as_api_error
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.state import ServerState
from pegainfer_server.web_ui import is_ui

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})  # need no API key: load balancers have none
UNCOUNTED_PATHS = frozenset({"/", "/health", "/metrics", "/version"})  # polled by machines; they would drown the rest
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: ServerMetrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in state.api_keys]
        self._ui = state.ui
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        else:  # a websocket, which only plugins have
            await send({"type": "websocket.close", "code": 1008, "reason": "a valid API key is needed"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        begun = time.perf_counter()
        try:
            await (self._app if self._admits(scope) else _refuse)(scope, receive, send_with_id)
        except Exception as error:
            if status:  # the answer has begun: nothing better can be said any more
                log.exception("request %s failed while it was answered", request_id)
            else:
                await as_api_error(error).response()(scope, receive, send_with_id)
        finally:
            if status and scope["path"] not in UNCOUNTED_PATHS:
                handler = getattr(scope.get("route"), "path", "none")
                self._metrics.http(scope["method"], handler, status, time.perf_counter() - begun)

    def _admits(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope.get("method") == "OPTIONS":
            return True
        if self._ui and scope["type"] == "http" and is_ui(scope):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = given.strip().encode()
        matches = [compare_digest(key, known) for known in self._keys]  # all, so that time tells nothing
        return scheme.lower() == "bearer" and any(matches)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
    error.headers["WWW-Authenticate"] = "Bearer"
    await error.response()(scope, receive, send)
