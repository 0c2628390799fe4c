"""An engine in a thread of this process: what `LLM`, tests and debugging use.

Owns the thread and the hand-over between it and the event loop: one thread-safe call per step.
"""

from __future__ import annotations

import asyncio
import queue
import threading

from pegainfer_core.client import EngineClient
from pegainfer_core.engine_loop import StartEngine, run_engine
from pegainfer_core.messages import FromEngine, Shutdown, ToEngine


class ThreadClient(EngineClient):
    """See the module docstring. `start_engine` runs in the thread."""

    def __init__(self, start_engine: StartEngine) -> None:
        super().__init__()
        self._start_engine = start_engine
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """See EngineClient."""
        channel = _QueueChannel(self._inbox, asyncio.get_running_loop(), self)
        self._thread = threading.Thread(
            target=run_engine,
            args=(self._start_engine, channel),
            kwargs={"prepare_when_idle": False},
            name="pegainfer-engine",
            daemon=True,
        )
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """See EngineClient."""
        self._inbox.put(message)

    async def close(self) -> None:
        """See EngineClient."""
        if self._thread is not None:
            self.send(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self.mark_closed()


class _QueueChannel:
    def __init__(
        self, inbox: queue.SimpleQueue[ToEngine], loop: asyncio.AbstractEventLoop, client: EngineClient
    ) -> None:
        self._inbox = inbox
        self._loop = loop
        self._client = client

    def receive(self, *, wait: bool) -> list[ToEngine]:
        messages = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def send(self, message: FromEngine) -> None:
        self._loop.call_soon_threadsafe(self._client.dispatch, message)
