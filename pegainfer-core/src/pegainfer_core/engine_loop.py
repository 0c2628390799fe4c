"""The engine's life: take messages, step while there is work, block while there is none.

Owns the order of receiving, stepping and sending. Knows nothing of how messages travel (`Channel`) or how the engine was built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from pegainfer_core.engine import Engine
from pegainfer_core.errors import PegainferError
from pegainfer_core.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    FromEngine,
    LoadProgress,
    Shutdown,
    ToEngine,
)

log = logging.getLogger(__name__)

StartEngine = Callable[[Callable[[LoadProgress], None]], tuple[Engine, EngineInfo]]


class Channel(Protocol):
    """The engine's end of the wire."""

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Everything that has arrived; with `wait`, at least one message."""
        ...

    def send(self, message: FromEngine) -> None:
        """Hand over one message without waiting for the client."""
        ...


def run_engine(start: StartEngine, channel: Channel, *, prepare_when_idle: bool) -> bool:
    """Start an engine and serve the channel until Shutdown (True) or death (False). The last message says which.

    `prepare_when_idle` lets an idle engine capture further graphs, which nobody else in the process may disturb by
    using the device.
    """
    try:
        engine, info = start(channel.send)
        channel.send(info)
        _serve(engine, channel, prepare_when_idle)
    except PegainferError as error:
        channel.send(EngineFailed(str(error)))
        return False
    except Exception as error:
        log.exception("the engine died")
        channel.send(EngineFailed(f"{type(error).__name__}: {error}"))
        return False
    return True


def _serve(engine: Engine, channel: Channel, prepare_when_idle: bool) -> None:
    while True:
        # An idle engine may prepare what later steps need, looking at its inbox in between, before it blocks.
        idle = not engine.has_work and not (prepare_when_idle and engine.runner.prepare_more())
        for message in channel.receive(wait=idle):
            if isinstance(message, AddRequest):
                engine.add(message)
            elif isinstance(message, AbortRequests):
                engine.abort(message.request_ids)
            elif isinstance(message, Shutdown):
                return
        if engine.has_work:
            outputs = engine.step()
            if outputs.outputs or outputs.num_tokens:
                channel.send(outputs)
