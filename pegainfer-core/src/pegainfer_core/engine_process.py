"""The engine's process: `python -m pegainfer_core.engine_process ADDRESS LOG_LEVEL LOG_FORMAT`, started by `process_client.ProcessClient`.

Owns the child's end of the socket and its promise to end with its parent. The first message is the EngineConfig.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.engine_loop import run_engine
from pegainfer_core.logs import LogFormat, configure_logging
from pegainfer_core.messages import TO_ENGINE_DECODER, EngineInfo, FromEngine, LoadProgress, ToEngine
from pegainfer_core.preload import import_torch
from pegainfer_core.startup import start_engine


def _age() -> float:
    """Seconds since this process began; at least its own time of computing, where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


BEGUN = time.perf_counter() - _age()


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


def main(address: str, log_level: int, log_format: LogFormat) -> int:
    """Serve until told to end; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(log_level, log_format)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    import_torch()  # the parent still looks for the model
    asked = time.perf_counter()
    config = msgspec.msgpack.decode(socket.recv(), type=EngineConfig)
    begun = BEGUN + time.perf_counter() - asked  # a download is no part of the start

    def start(on_progress: Callable[[LoadProgress], None]) -> tuple[Engine, EngineInfo]:
        started = start_engine(config, on_progress, begun=begun)
        settle()
        return started

    ended_well = run_engine(start, SocketChannel(socket), prepare_when_idle=True)
    socket.close(linger=1000)
    context.term()
    return 0 if ended_well else 1


def settle() -> None:
    """After a start: give memory that only the start needed back, and leave what lives as long as the process out of collections."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _end_with_parent() -> None:
    """The parent never writes to our standard input; it closes when the parent is gone."""
    while os.read(0, 1):  # not sys.stdin: its lock would still be held when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), "json" if sys.argv[3] == "json" else "text"))
