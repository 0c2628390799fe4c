"""The engine's process: `python -m pegainfer_core.engine_process ADDRESS LOG_LEVEL LOG_FORMAT`, started by `process_client.ProcessClient`.

Owns the promise to end with the parent, and that the import of torch, most of a start, begins before all else.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

from pegainfer_core.logs import LogFormat, configure_logging
from pegainfer_core.preload import import_torch


def _age() -> float:
    """Seconds since this process began; at least its own time of computing, where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


BEGUN = time.perf_counter() - _age()


def main(address: str, log_level: int, log_format: LogFormat) -> int:
    """Serve until told to end; returns the exit code."""
    gc.disable()  # imports make many objects and no garbage: looking for it is an eighth of importing torch; see `settle`
    import_torch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(log_level, log_format)
    from pegainfer_core.engine_socket import serve  # meanwhile

    return 0 if serve(address, BEGUN) else 1


def _end_with_parent() -> None:
    """The parent never writes to our standard input; it closes when the parent is gone."""
    while os.read(0, 1):  # not sys.stdin: its lock would still be held when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), "json" if sys.argv[3] == "json" else "text"))
