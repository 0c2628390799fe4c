"""A lean HTTP/1.1 client: posts a body, and keeps each piece of the answer with the moment it arrived.

Owns connections. Nothing is decoded while requests run, so that measuring costs the machine as little as possible; `records`
reads the pieces afterwards. Connections are kept open between requests, as the OpenAI SDK does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

IDLE_SECONDS = 2.0
"""A connection idle for longer is not used again: servers close them, uvicorn after 5 s."""
PORTS = {"http": 80, "https": 443}


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI endpoint that is measured."""

    name: str
    """What the results call it."""
    url: str
    """Root of the server, with or without /v1."""
    model: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a URL that is none."""
        parts = urlsplit(self.url)
        if parts.scheme not in PORTS or not parts.hostname:
            raise ValueError(f"{self.url!r} is no http or https URL")

    @property
    def root(self) -> str:
        """The URL without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclasses.dataclass(slots=True)
class Exchange:
    """One request and its answer as it came. Times are of time.perf_counter."""

    sent: float
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)
    failure: str | None = None
    """Set if the connection failed; the answer may be incomplete."""


class HttpClient:
    """Connections to one endpoint, as many as there are requests at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.root)
        assert parts.hostname is not None, "checked by Endpoint"
        self._host = parts.hostname
        self._port = parts.port or PORTS[parts.scheme]
        self._secure = parts.scheme == "https"
        self._prefix = parts.path
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        if endpoint.api_key is not None:
            self._headers += f"Authorization: Bearer {endpoint.api_key}\r\n"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes) -> Exchange:
        """Send, and return when the answer is complete or the connection failed. Cancelling it closes the connection."""
        exchange = Exchange(time.perf_counter())
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        try:
            connection = self._reusable() or await self._connect()
            try:
                await connection.exchange(exchange, head.encode("ascii") + body)
            except asyncio.CancelledError:
                connection.close()
                raise
        except (OSError, httptools.HttpParserError) as error:
            exchange.failure = f"{type(error).__name__}: {error}"
        else:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
        exchange.ended = time.perf_counter()
        return exchange

    def close(self) -> None:
        """Close every connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _reusable(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.perf_counter() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._secure or None)
        return connection


class _Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._complete: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    async def exchange(self, exchange: Exchange, data: bytes) -> None:
        """Send `data` and fill in the exchange. Raises OSError or HttpParserError."""
        assert self._transport is not None, "connected"
        self._exchange = exchange
        self._complete = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)
        try:
            await self._complete
        finally:
            self._exchange = self._complete = None
            self.idle_since = time.perf_counter()

    def close(self) -> None:
        """Close it."""
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end(exc or ConnectionResetError("the server closed the connection"))

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self._exchange is not None:
            self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """See httptools."""
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)

    def _end(self, error: Exception) -> None:
        self.reusable = False
        if self._complete is not None and not self._complete.done():
            self._complete.set_exception(error)
