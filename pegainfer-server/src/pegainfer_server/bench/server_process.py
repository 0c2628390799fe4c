"""A server as a process of its own, from its command to its end: time to ready, memory of the whole process tree, GPU memory.

Owns the process. Works for any server that answers /health with 200 once it is ready.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from pegainfer_core.errors import PegainferError

from pegainfer_server.bench.provenance import gpu_memory_mib

POLL_SECONDS = 0.02
STOP_SECONDS = 30.0
LOG_TAIL = 2000
MIB = 2**20


class ServerProcess:
    """One run of a server. Use as a context manager; whatever happens, no process of it is left."""

    def __init__(self, command: Sequence[str], root: str, environment: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._root = root
        self._environment = None if environment is None else dict(environment)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process: subprocess.Popen[bytes] | None = None
        self._gpu_before: float | None = None
        self._begun = 0.0

    def __enter__(self) -> ServerProcess:
        self._gpu_before = gpu_memory_mib()
        self._begun = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise PegainferError(f"{self._command[0]} cannot be started: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        self._log.close()

    @property
    def pid(self) -> int:
        """Of its first process."""
        assert self._process is not None, "started"
        return self._process.pid

    def wait_ready(self, timeout: float) -> dict[str, float]:
        """Seconds from the start to the first HTTP answer and to /health 200. Raises PegainferError with the end of its log."""
        assert self._process is not None, "started"
        answered: float | None = None
        with httpx.Client(timeout=5.0) as http:
            while (seconds := time.perf_counter() - self._begun) < timeout:
                if self._process.poll() is not None:
                    raise PegainferError(f"the server ended (exit code {self._process.returncode}):\n{self.log_tail()}")
                try:
                    status = http.get(f"{self._root}/health").status_code
                    seconds = time.perf_counter() - self._begun
                    answered = seconds if answered is None else answered
                    if status == httpx.codes.OK:
                        return {"answers_s": round(answered, 3), "ready_s": round(seconds, 3)}
                except httpx.TransportError:
                    pass
                time.sleep(POLL_SECONDS)
        raise PegainferError(f"the server was not ready after {timeout:.0f} s:\n{self.log_tail()}")

    def memory(self) -> dict[str, Any]:
        """Resident memory of all its processes now, and GPU memory in use above what it was before the start, in MiB.

        `rss_mib` counts memory shared between processes in each of them; `pss_mib` counts it once (Linux, else None).
        """
        rss = pss = 0
        names = []
        for process in self._tree():
            try:
                info = process.memory_full_info()
                names.append(process.name())
            except psutil.Error:  # it ended meanwhile
                continue
            rss += info.rss
            pss += getattr(info, "pss", 0)
        gpu = gpu_memory_mib()
        return {
            "processes": len(names),
            "rss_mib": round(rss / MIB, 1),
            "pss_mib": round(pss / MIB, 1) if pss else None,
            "gpu_mib": None if gpu is None or self._gpu_before is None else round(gpu - self._gpu_before, 1),
        }

    def stop(self) -> dict[str, Any]:
        """End it with SIGTERM, or SIGKILL if that takes too long, and whatever is left of its tree."""
        assert self._process is not None, "started"
        tree = self._tree()
        begun = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        try:
            code: int | None = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        seconds = time.perf_counter() - begun
        left = [process for process in tree if process.is_running()]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=STOP_SECONDS)
        return {"stop_s": round(seconds, 3), "exit_code": code}

    def log_tail(self) -> str:
        """The end of what it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL))
        return self._log.read().decode("utf-8", "replace").strip()

    def _tree(self) -> list[psutil.Process]:
        assert self._process is not None, "started"
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def files_below(paths: Sequence[Path]) -> list[Path]:
    """All files of some files and folders."""
    return [
        file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()
    ]


def evict(paths: Sequence[Path]) -> int:
    """Ask the kernel to forget the cached pages of these files; returns their bytes. Linux only."""
    if not hasattr(os, "posix_fadvise"):
        raise PegainferError("a cold page cache needs posix_fadvise, which this system lacks")
    total = 0
    os.sync()  # pages that are not on disk yet cannot be dropped
    for file in files_below(paths):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(handle).st_size
        finally:
            os.close(handle)
    return total


def fetch(paths: Sequence[Path]) -> int:
    """Read these files once, so that they are in the page cache; returns their bytes."""
    total = 0
    for file in files_below(paths):
        with file.open("rb") as stream:
            while chunk := stream.read(16 * MIB):
                total += len(chunk)
    return total
