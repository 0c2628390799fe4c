"""What surrounds every route: API keys, rate limits, X-Request-Id, HTTP metrics, and a last net for what nobody foresaw.

Owns the outermost layer but CORS, as plain ASGI so that streams and disconnects pass through untouched. Knows nothing of what routes do.
"""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from hmac import compare_digest

from pegainfer_core.logs import request_id as current_request_id
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegainfer_server.http_errors import ApiError, as_api_error
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.probes import PROBE_PATHS
from pegainfer_server.rate_limit import RateLimit
from pegainfer_server.request_times import TRACE_HEADERS, caller_trace
from pegainfer_server.state import ServerState
from pegainfer_server.web_ui import is_ui

log = logging.getLogger(__name__)

UNCOUNTED_PATHS = PROBE_PATHS | {"/", "/metrics", "/version"}  # polled by machines; they would drown the rest
MOST_LOGGED = 16_384  # bytes of a body that --log-prompts writes
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: ServerMetrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in state.api_keys]
        self._ui = state.ui
        self._limit = RateLimit(state.requests_per_minute) if state.requests_per_minute else None
        self._log_prompts = state.log_prompts
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan" or self._refusal(scope) is None:
            await self._app(scope, receive, send)
        else:  # a websocket, which only plugins have
            await send({"type": "websocket.close", "code": 1008, "reason": "a valid API key is needed"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        token = current_request_id.set(request_id)
        trace_token = caller_trace.set({name: headers[name] for name in TRACE_HEADERS if name in headers})
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        begun = time.perf_counter()
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response(scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(scope, _logging(receive) if self._log_prompts else receive, send_with_id)
        except Exception as error:
            if status:  # the answer has begun: nothing better can be said any more
                log.exception("request %s failed while it was answered", request_id)
            else:
                await as_api_error(error).response(scope["path"])(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - begun
            level = logging.INFO if status >= 400 and scope["path"] not in PROBE_PATHS else logging.DEBUG
            log.log(level, "%s %r: %d after %.3f s", scope["method"], scope["path"], status, seconds)
            if status and scope["path"] not in UNCOUNTED_PATHS:
                handler = getattr(scope.get("route"), "path", "none")
                self._metrics.http(scope["method"], handler, status, seconds)
            caller_trace.reset(trace_token)
            current_request_id.reset(token)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why this request may not reach the application; None if it may."""
        if scope["path"] in PROBE_PATHS or scope.get("method") == "OPTIONS":
            return None
        caller = _client_address(scope)
        if self._keys:
            number = self._key_number(Headers(scope=scope))
            if number is None:
                page = self._ui and scope["type"] == "http" and is_ui(scope)  # it holds no secret, and asks for a key
                return None if page else _no_key()
            caller = f"key {number}"
        if self._limit is not None and scope.get("method") == "POST":
            wait = self._limit.seconds_to_wait(caller)
            if wait:
                return _too_many(math.ceil(wait))
        return None

    def _key_number(self, headers: Headers) -> int | None:
        """Which key was sent, as `Authorization: Bearer KEY` or `x-api-key: KEY` (as Anthropic's clients do); None for no valid one."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = [given.strip()] if scheme.lower() == "bearer" else []
        if "x-api-key" in headers:
            sent.append(headers["x-api-key"])
        # every pair is compared, so that the time taken tells nothing
        matches = [
            index for key in sent for index, known in enumerate(self._keys) if compare_digest(key.encode(), known)
        ]
        return matches[0] if matches else None


def _client_address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def _no_key() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _too_many(seconds: int) -> ApiError:
    return ApiError(
        429,
        f"too many requests; try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )


def _logging(receive: Receive) -> Receive:
    """`receive`, and the body is written to the log when all of it has come."""
    body = bytearray()

    async def receive_and_log() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            body.extend(message.get("body", b"")[: MOST_LOGGED - len(body)])
            if body and not message.get("more_body", False):
                log.info("body %r", bytes(body))
        return message

    return receive_and_log
