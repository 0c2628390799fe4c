"""An engine in a process of its own: what `pegainfer serve` uses.

Owns the child process, its socket and the detection of its death. Imports no torch. No orphan: the child ends when its
standard input closes, which the operating system does when this process dies, however it dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from pegainfer_core.client import EngineClient
from pegainfer_core.config import EngineConfig
from pegainfer_core.cpu_settings import engine_settings
from pegainfer_core.logs import LogFormat
from pegainfer_core.messages import TO_ENGINE_ENCODER, FromEngine, Shutdown, ToEngine

if TYPE_CHECKING:
    from pegainfer_core.ipc_folder import IpcFolder

CLOSE_SECONDS = 10.0
"""How long a closing engine may take before it is killed."""

_DECODER = msgspec.msgpack.Decoder(FromEngine)


class ProcessClient(EngineClient):
    """See the module docstring."""

    def __init__(self, config: EngineConfig, log_format: LogFormat = "text") -> None:
        super().__init__()
        self.config = config
        """What the engine will be told; may be replaced until `start`."""
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._folder: IpcFolder | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._log_format = log_format

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    def cpu_seconds(self) -> float | None:
        """See EngineClient; None where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user and in system mode
        except (OSError, AttributeError, IndexError):
            return None

    async def start(self) -> None:
        """See EngineClient."""
        await self.spawn()
        self._send_bytes(msgspec.msgpack.encode(self.config))

    async def spawn(self) -> None:
        """The first part of `start`, for when the config is not final yet: a process that imports what it will need."""
        if self._process is not None:
            return
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        level = logging.getLogger().getEffectiveLevel()  # the engine logs what this process would
        command = [sys.executable, "-m", "pegainfer_core.engine_process", self._bind(), str(level)]
        command.append(self._log_format)
        environment = os.environ | engine_settings(os.environ)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env=environment)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    def send(self, message: ToEngine) -> None:
        """See EngineClient."""
        self._send_bytes(TO_ENGINE_ENCODER.encode(message))

    async def close(self) -> None:
        """See EngineClient."""
        self._closing = True
        if self._process is not None and self._process.returncode is None:
            if self.state == "loading":
                self._process.kill()  # it reads no message before it is ready, and has nothing to lose
            else:
                self.send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=0)
            self._context.term()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self.mark_closed()

    def _bind(self) -> str:
        """Bind the socket; IPC where the platform has it, else loopback TCP. Returns the address."""
        assert self._socket is not None
        if os.name == "posix" and zmq.has("ipc"):
            from pegainfer_core.ipc_folder import IpcFolder  # POSIX only

            self._folder = IpcFolder()
            address = f"ipc://{self._folder.path}/engine"
            self._socket.bind(address)
            return address
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def _send_bytes(self, data: bytes) -> None:
        assert self._socket is not None
        # Unlimited queue: the future is done at once, so there is nothing to await.
        self._socket.send(data)

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            self.dispatch(_DECODER.decode(await self._socket.recv()))

    async def _watch(self) -> None:
        """Turn the end of the process into the death of the client, after its last words."""
        assert self._process is not None and self._socket is not None
        code = await self._process.wait()
        while self.state in ("loading", "ready") and await self._socket.poll(200):
            await asyncio.sleep(0)  # `_receive` takes what is there
        if not self._closing:
            self.died(f"the engine process {_how_it_ended(code)}")


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
