"""Requests whose grammar is being compiled: they reach the scheduler when it is, and end at once if it cannot be.

Owns the wait and its time limit. Knows nothing of scheduling. No torch.
"""

from __future__ import annotations

import concurrent.futures
import time
from concurrent.futures import Future

from pegainfer_core.errors import RequestError
from pegainfer_core.grammars import CompiledGrammar, Grammars, refusal
from pegainfer_core.messages import AddRequest, RequestOutput
from pegainfer_core.structured import Grammar

COMPILE_SECONDS = 4.0
"""Short enough for a server to answer with a status of its own: a stream's headers go out after 5 seconds."""
MAX_COMPILING = 256
"""Requests that wait for a grammar; more are refused with code queue_full."""


class GrammarAdmission:
    """One for an engine. A request that has passed holds its grammar until `release`."""

    def __init__(self, grammars: Grammars, *, seconds: float = COMPILE_SECONDS) -> None:
        self._grammars = grammars
        self._seconds = seconds
        self._waiting: dict[str, tuple[AddRequest, Future[CompiledGrammar], float]] = {}
        """With the time (monotonic) of its arrival."""
        self._held: dict[str, Grammar] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def add(self, message: AddRequest) -> None:
        """Begin to compile what a request asks for. Raises RequestError if too many wait, or its id is taken."""
        grammar = message.params.grammar
        assert grammar is not None
        if message.request_id in self._held:
            raise RequestError(f"request id {message.request_id!r} is already in use")
        if len(self._waiting) >= MAX_COMPILING:
            raise RequestError(f"{len(self._waiting)} requests wait for their grammars; try again later", "queue_full")
        future = self._grammars.compile(grammar)
        self._held[message.request_id] = grammar
        self._waiting[message.request_id] = (message, future, time.monotonic())

    def take(self) -> list[tuple[AddRequest, RequestError | None]]:
        """Requests that wait no longer, in order of arrival, with the reason for those that are refused."""
        done: list[tuple[AddRequest, RequestError | None]] = []
        for message, future, arrived in list(self._waiting.values()):
            if future.done() or self._too_long(arrived):
                del self._waiting[message.request_id]
                done.append((message, self._refusal(message, future)))
        return done

    def _too_long(self, arrived: float) -> bool:
        """Loading the vocabulary, before the very first grammar, does not count."""
        loaded = self._grammars.loaded_at
        return loaded is not None and time.monotonic() - max(arrived, loaded) >= self._seconds

    def wait(self, seconds: float) -> None:
        """Block until a grammar is compiled, or for so long."""
        futures = [future for _, future, _ in self._waiting.values()]
        concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)

    def abort(self, request_ids: list[str]) -> list[RequestOutput]:
        """End those of these requests that wait."""
        ended = [name for name in request_ids if self._waiting.pop(name, None) is not None]
        return [RequestOutput(name, [], None, None, None, "abort", None, 0, None, None, None) for name in ended]

    def release(self, request_ids: list[str]) -> None:
        """These requests have ended; those without a grammar are none of ours."""
        for request_id in request_ids:
            grammar = self._held.pop(request_id, None)
            if grammar is not None:
                self._grammars.release(grammar)

    def _refusal(self, message: AddRequest, future: Future[CompiledGrammar]) -> RequestError | None:
        grammar = message.params.grammar
        assert grammar is not None
        if not future.done():
            return refusal(grammar, f"the grammar was not compiled within {self._seconds:g} seconds; simplify it")
        error = future.exception()
        return None if error is None else refusal(grammar, str(error))
