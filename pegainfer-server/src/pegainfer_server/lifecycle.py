"""The life of a server on a bound socket: load, serve, drain, end.

Owns signals, the order of things and how it ends; what is loaded and which application is served is given. /health
answers as soon as the application is imported, and whatever ends the server, the engine ends before it.

End: 0 after SIGTERM or SIGINT, whether or not all live requests made it within the shutdown timeout; an exception (which
`cli.main` prints as the last line) if the start failed or the engine died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from pegainfer_core.client import EngineClient
from pegainfer_core.errors import EngineDeadError
from pegainfer_core.logs import LogFormat
from pegainfer_core.messages import AbortRequests

from pegainfer_server.listening import is_public, url_of
from pegainfer_server.progress import describe, show_progress, timeline
from pegainfer_server.state import ServerState
from pegainfer_server.threads import in_daemon_thread
from pegainfer_server.tls import Tls

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
"""What answers get to reach their clients once nothing more is computed."""
DEATH_SECONDS = 1.0
"""How long /health and requests still get an answer (503) after the engine died."""
POLL_SECONDS = 0.05

Load = Callable[[ServerState], Awaitable[None]]
"""Starts the client and fills in the state; returns when requests can be taken. Raises PegainferError."""


class Lifecycle:
    """One run of one server, from a bound socket to the end."""

    def __init__(
        self,
        state: ServerState,
        listener: socket.socket,
        load: Load,
        *,
        add_routes: Callable[[FastAPI, EngineClient], None] | None = None,
        shutdown_timeout: float,
        begun: float,
        tls: Tls | None = None,
        log_format: LogFormat = "text",
    ) -> None:
        self._state = state
        self._listener = listener
        self._load = load
        self._add_routes = add_routes
        self._shutdown_timeout = shutdown_timeout
        self._begun = begun
        self._tls = tls
        self._log_format = log_format
        self._stop = asyncio.Event()
        self._http: _Uvicorn | None = None

    async def run(self) -> int:
        """Serve until a signal (0), or raise what went wrong after everything is closed."""
        with self._signals():
            loading = asyncio.create_task(self._load_and_announce())
            serving = asyncio.create_task(self._serve_http())
            stopped = asyncio.create_task(self._stop.wait())
            died = asyncio.create_task(self._state.client.wait_dead())
            watching = asyncio.create_task(self._state.liveness.watch())
            try:
                await asyncio.wait({loading, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done() and not stopped.done():
                    loading.result()  # raises what failed
                    await asyncio.wait({died, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    await self._drain()
                elif died.done():
                    # Whoever asks now is told why, which a closed port would not.
                    await asyncio.wait({serving, stopped}, timeout=DEATH_SECONDS)
                    raise EngineDeadError(f"the engine died: {died.result()}")
                else:
                    serving.result()
                return 0
            finally:
                unfinished = not loading.done()
                await self._close(serving, [loading, stopped, died, watching])
                if unfinished and self._stop.is_set():
                    _exit_now(0)  # a download that still runs in a thread would hold the interpreter

    async def _load_and_announce(self) -> None:
        client = self._state.client
        showing = asyncio.create_task(show_progress(client, bars=self._log_format == "text"))
        try:
            await self._load(self._state)
        finally:
            showing.cancel()
            await asyncio.wait({showing})
        assert client.info is not None, "loaded means that the engine said what it is"
        log.info("engine info %s", msgspec.json.encode(client.info).decode())
        if is_public(self._listener) and not self._state.api_keys:
            log.warning("other machines can reach this server and no API key is set (--api-key)")
        url = url_of(self._listener, "http" if self._tls is None else "https")
        self._say(describe(client.info))
        self._say(timeline(time.monotonic() - self._begun, client.info.timeline))
        self._say(f"serving {', '.join(self._state.model_names)} at {url}/v1")

    async def _serve_http(self) -> None:
        app = await in_daemon_thread(self._create_app)
        config = uvicorn.Config(
            app,
            http="httptools",
            log_config=None,
            access_log=False,
            server_header=False,
            **({} if self._tls is None else self._tls.uvicorn_settings()),
            timeout_graceful_shutdown=FLUSH_SECONDS,  # type: ignore[arg-type]  # it is handed to asyncio.wait_for
        )
        self._http = _Uvicorn(config)
        if self._stop.is_set():
            return
        await self._http.serve(sockets=[self._listener])

    def _create_app(self) -> FastAPI:
        from pegainfer_server.app import create_app  # seconds of imports, in a thread beside the engine's start

        return create_app(self._state, self._add_routes)

    async def _drain(self) -> None:
        """Refuse new requests and let live ones finish; those that are late end with finish reason abort."""
        self._state.draining = True
        client = self._state.client
        if client.num_open:
            log.info("finishing %d live requests for up to %g s", client.num_open, self._shutdown_timeout)
        if await self._none_open(self._shutdown_timeout):
            return
        log.warning("%d requests are cut off", client.num_open)
        client.send(AbortRequests(client.open_ids))
        await self._none_open(FLUSH_SECONDS)

    async def _none_open(self, seconds: float) -> bool:
        """Wait until no request is open, or the engine is gone; False if it takes longer."""
        client = self._state.client
        deadline = time.monotonic() + seconds
        while client.num_open and client.state == "ready":
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _close(self, serving: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """End the engine, flush the answers, and leave nothing running."""
        self._state.draining = True
        await self._state.client.close()
        if self._http is not None:
            self._http.should_exit = True
            await asyncio.wait({serving})
        for task in (*tasks, serving):
            task.cancel()
        await asyncio.wait([*tasks, serving])

    def _say(self, line: str) -> None:
        """A line for people; in a log for machines it is a record like any other."""
        if self._log_format == "json":
            log.info("%s", line)
            return
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = [signal.SIGINT, signal.SIGTERM]
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            _exit_now(128 + number)  # the engine process notices and ends
        log.info("%s: shutting down; a second signal ends at once", number.name)
        self._stop.set()


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own signal handling: signals are the lifecycle's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _exit_now(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)
