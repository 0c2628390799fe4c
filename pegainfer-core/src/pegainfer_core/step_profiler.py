"""Traces of torch's profiler around some steps of a serving engine: what --profile-dir writes.

Owns which steps are recorded and the files. An observer of steps like any other; the engine does not know it. Torch is imported when a
recording begins.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from pegainfer_core.engine import StepReport
from pegainfer_core.errors import ConfigError

log = logging.getLogger(__name__)

FIRST_STEP = 10
NUM_STEPS = 20
WARM_UP_STEPS = 3
"""Steps under a profiler that already runs but whose times are not kept: its first ones are slow."""


class StepProfiler:
    """Records steps `FIRST_STEP` to `FIRST_STEP + NUM_STEPS` of the engine, and as many again on each SIGUSR1."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder cannot be made."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile-dir {folder} cannot be made: {error}") from error
        self._folder = folder
        self._wanted = False
        self._profiler: Any = None
        self._steps: list[int] = []
        again = ""
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda *_: self.record())
            again = f"; kill -USR1 {os.getpid()} records {NUM_STEPS} more"
        log.info("steps %d to %d will be traced into %s%s", FIRST_STEP, FIRST_STEP + NUM_STEPS - 1, folder, again)

    def record(self) -> None:
        """Begin to record after the step that runs now; without effect during a recording."""
        self._wanted = True

    def __call__(self, report: StepReport) -> None:
        """Take note of the end of a step."""
        if self._profiler is not None:
            self._steps.append(report.index)
            self._profiler.step()
            if len(self._steps) == WARM_UP_STEPS + NUM_STEPS:
                self._stop()
        elif self._wanted or report.index == FIRST_STEP - WARM_UP_STEPS - 1:
            self._start()

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._steps = []
        self._profiler = profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule(wait=0, warmup=WARM_UP_STEPS, active=NUM_STEPS, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self._file())),
        )
        self._profiler.start()

    def _stop(self) -> None:
        self._profiler.stop()
        self._profiler, self._wanted = None, False
        log.info("traced %d steps: %s", NUM_STEPS, self._file())

    def _file(self) -> Path:
        """Steps are numbered as in the plans."""
        return self._folder / f"steps-{self._steps[WARM_UP_STEPS]}-{self._steps[-1]}.json"
