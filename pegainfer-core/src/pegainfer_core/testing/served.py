"""A real `pegainfer serve` in a process of its own, for tests that go through HTTP.

Owns the process and its log. Knows the command line only by its text: core does not import the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

COMMAND = [sys.executable, "-c", "import sys; from pegainfer_server.cli import main; sys.exit(main())"]


class Served:
    """A running server. `url` is the root, without /v1."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]) -> None:
        self.process = process
        self.url = url
        self.log = log
        # a pipe that nobody reads would fill up and hold the server
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def engine_pid(self) -> int:
        """The engine's process, found as the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for file in children for pid in file.read_text().split()]
        assert len(pids) == 1, pids
        return pids[0]

    def wait(self, timeout: float = 60) -> int:
        """Exit code, once it has ended; the rest of its output is then in `log`."""
        self._reader.join(timeout)
        return self.process.wait(timeout)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed when the test is over
            self.log.extend(self.process.stdout)


@contextlib.contextmanager
def served(model: Path, *flags: str, threads: int = 1) -> Iterator[Served]:
    """Serve `model` on a free port and yield when it is ready; the process is gone at the end."""
    command = [*COMMAND, "serve", str(model), "--port", "0", "--served-model-name", "test", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield _ready(process)
        finally:
            process.kill()


def _ready(process: subprocess.Popen[str]) -> Served:
    assert process.stdout is not None
    log: list[str] = []
    for line in process.stdout:
        log.append(line)
        if (found := re.search(r"at (http://\S+)/v1", line)) is not None:
            return Served(process, found[1], log)
    raise AssertionError("the server ended before it was ready:\n" + "".join(log))
