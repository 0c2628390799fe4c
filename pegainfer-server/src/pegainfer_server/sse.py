"""Server-sent events: their bytes, and the response that sends them.

Owns the wire format and what happens when the client leaves or the work fails midway. Knows nothing of completions or chat. This is the
per-token path: plain bytes, no models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pegainfer_server.disconnect import client_gone
from pegainfer_server.http_errors import ApiError, as_api_error

encode = msgspec.json.Encoder().encode
HEADERS_AFTER = 5.0  # seconds; the engine refuses within a step
DONE = b"data: [DONE]\n\n"
_MARK = "@text@"


def event(data: Any) -> bytes:
    """One event that carries `data` as JSON."""
    return b"data: " + encode(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """One event under the name that is the `type` of its data, as the Responses and Anthropic APIs have it."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


def _error_and_done(error: ApiError) -> bytes:
    return event(error.body) + DONE


class TextEvent:
    """Events that differ in one string only, encoded once around it."""

    def __init__(self, data: Any) -> None:
        """`data` holds `TextEvent.MARK` where the text goes, once."""
        before, after = event(data).rsplit(encode(_MARK), 1)
        self._before = before
        self._after = after

    MARK = _MARK

    def with_text(self, text: str) -> bytes:
        """The event for `text`."""
        return self._before + encode(text) + self._after


class EventStream(Response):
    """Sends events as they come. The headers go out with the first one, so that a refusal still gets its own status; if that
    takes long (a queue, a long prompt) they go first, so that nobody on the way gives up waiting for them.

    Leaving early (the client went away, the server stops) closes the generator, which aborts its requests.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        last_words: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        """`last_words`: what an error midway is told with; by default the error object and [DONE]."""
        self._events = events
        self._last_words = last_words or _error_and_done
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves. Raises what the generator raises before the headers are out."""
        del scope
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._events.aclose()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        started = False
        first = asyncio.ensure_future(anext(self._events))
        try:
            if not (await asyncio.wait({first}, timeout=HEADERS_AFTER))[0]:
                started = True
                await send(start)
            chunk = await first
            if not started:
                started = True
                await send(start)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": self._last_words(as_api_error(error)), "more_body": True})
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
