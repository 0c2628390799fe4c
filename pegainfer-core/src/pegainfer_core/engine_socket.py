"""An engine at its end of the ZeroMQ socket, from the first message (the EngineConfig) to the last.

Owns the channel and the order connect, start, serve. Imported beside torch: see `engine_process.py`, whose process this runs in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import zmq

from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.engine_loop import run_engine
from pegainfer_core.messages import TO_ENGINE_DECODER, EngineInfo, FromEngine, LoadProgress, ToEngine
from pegainfer_core.settling import settle
from pegainfer_core.startup import start_engine


class SocketChannel:
    """The engine's end of the ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """See Channel."""
        messages: list[ToEngine] = []
        flags = 0 if wait else zmq.NOBLOCK
        while True:
            try:
                messages.append(TO_ENGINE_DECODER.decode(self._socket.recv(flags)))
            except zmq.Again:
                return messages
            flags = zmq.NOBLOCK

    def send(self, message: FromEngine) -> None:
        """See Channel."""
        self._socket.send(self._encoder.encode(message))


def serve(address: str, begun: float) -> bool:
    """Serve until told to end; False if the engine died. `begun` (perf_counter) is when its process began."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    asked = time.perf_counter()
    config = msgspec.msgpack.decode(socket.recv(), type=EngineConfig)
    begun += time.perf_counter() - asked  # a download is no part of the start

    def start(on_progress: Callable[[LoadProgress], None]) -> tuple[Engine, EngineInfo]:
        started = start_engine(config, on_progress, begun=begun)
        settle()
        return started

    ended_well = run_engine(start, SocketChannel(socket), prepare_when_idle=True)
    socket.close(linger=1000)
    context.term()
    return ended_well
