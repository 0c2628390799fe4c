"""How anything outside the engine talks to it.

Owns the `EngineClient` interface and the routing of step messages to per-request streams. Knows nothing of HTTP, text or torch.
Two implementations: `process_client.ProcessClient` (another process, what `serve` uses) and `thread_client.ThreadClient`
(a thread of this one, what `LLM` and tests use).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from pegainfer_core.errors import EngineDeadError
from pegainfer_core.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineStats,
    FromEngine,
    LoadProgress,
    RequestOutput,
    StepOutputs,
    ToEngine,
)

ClientState = Literal["loading", "ready", "dead", "closed"]


class EngineClient(ABC):
    """One engine, seen from an event loop. All methods belong to the loop that called `start`."""

    def __init__(self) -> None:
        self.state: ClientState = "loading"
        self.progress: LoadProgress | None = None
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.death: str | None = None
        """Why the engine is dead, once `state` is "dead"."""
        self.on_step: list[Callable[[StepOutputs], None]] = []
        """Called once per step message, before its outputs reach their requests (metrics, tracing)."""
        self.on_progress: list[Callable[[LoadProgress], None]] = []
        """Called with each report of the start."""
        self._streams: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._changed = asyncio.Event()

    @abstractmethod
    async def start(self) -> None:
        """Begin loading and return at once; see `wait_ready`."""

    @abstractmethod
    def send(self, message: ToEngine) -> None:
        """Hand one message to the engine without waiting."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine and wait until it is gone. Open requests raise EngineDeadError."""

    def cpu_seconds(self) -> float | None:
        """Processor time that the engine's own process has used; None if it has none or nobody knows."""
        return None

    async def wait_ready(self) -> EngineInfo:
        """Wait for the end of the start. Raises EngineDeadError with the engine's own words if it failed."""
        while self.state == "loading":
            self._changed.clear()
            await self._changed.wait()
        if self.state != "ready" or self.info is None:
            raise EngineDeadError(self.death or "the engine was closed")
        return self.info

    async def wait_dead(self) -> str:
        """Wait until the engine is dead or closed; returns why."""
        while self.state in ("loading", "ready"):
            self._changed.clear()
            await self._changed.wait()
        return self.death or "closed"

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Submit and yield each step's output; the last one has a finish reason. Leaving the iterator early aborts the request.

        Raises EngineDeadError if the engine is, or becomes, dead.
        """
        if self.state != "ready":
            raise EngineDeadError(self.death or f"the engine is {self.state}")
        assert request.request_id not in self._streams, "request ids are unique among open requests"
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._streams[request.request_id] = queue
        finished = False
        try:
            self.send(request)
            while not finished:
                output = await queue.get()
                if output is None:
                    raise EngineDeadError(self.death or "the engine was closed")
                finished = output.finish_reason is not None
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            if not finished and self.state == "ready":
                self.send(AbortRequests([request.request_id]))

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet ended or left."""
        return len(self._streams)

    @property
    def open_ids(self) -> list[str]:
        """Ids of those requests."""
        return list(self._streams)

    def dispatch(self, message: FromEngine) -> None:
        """Route one message of the engine; called on the event loop by the implementation."""
        if isinstance(message, StepOutputs):
            self.stats = message.stats
            for observe in self.on_step:
                observe(message)
            for output in message.outputs:
                queue = self._streams.get(output.request_id)
                if queue is not None:  # a client that left no longer listens
                    queue.put_nowait(output)
        elif isinstance(message, LoadProgress):
            self.progress = message
            for report in self.on_progress:
                report(message)
        elif isinstance(message, EngineInfo):
            self.info = message
            self._enter("ready")
        elif isinstance(message, EngineFailed):
            self.died(message.message)

    def died(self, reason: str) -> None:
        """Enter the dead state and fail every open request."""
        if self.state in ("dead", "closed"):
            return
        self.death = reason
        self._enter("dead")
        for queue in self._streams.values():
            queue.put_nowait(None)

    def mark_closed(self) -> None:
        """Enter the closed state; what is still open fails."""
        if self.state != "dead":
            self._enter("closed")
        for queue in self._streams.values():
            queue.put_nowait(None)

    def _enter(self, state: ClientState) -> None:
        self.state = state
        self._changed.set()
