"""Is the engine making progress? What liveness probes ask, answered from its steps and not from the clock alone.

Owns the rule. An engine with open requests is stalled once it has told of no step for the timeout. A CPU may rightly compute one step for
longer: there the engine's processor time counts as progress too, for at most `PATIENCE` timeouts. An idle engine is never stalled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pegainfer_core.client import EngineClient
from pegainfer_core.messages import StepOutputs

log = logging.getLogger(__name__)

DEFAULT_STALL_TIMEOUT = 120.0
PATIENCE = 10
"""Timeouts that a step of a busy CPU may take: one that computes for ever is stalled as well."""
BUSY = 0.1
"""Cores that a computing engine uses at least."""
MOST_SECONDS_BETWEEN_LOOKS = 5.0


class Liveness:
    """Watches one engine. `timeout` in seconds; 0 never calls it stalled."""

    def __init__(
        self,
        client: EngineClient,
        timeout: float = DEFAULT_STALL_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._timeout = timeout
        self._clock = clock
        self._last_step = self._last_progress = self._looked = clock()
        self._cpu: float | None = None
        client.on_step.append(self._on_step)

    def stalled_for(self) -> float | None:
        """Seconds since the last step, if the engine is stalled; else None. Ask at least every few seconds: see `watch`."""
        now = self._clock()
        if not self._timeout or self._client.state != "ready" or not self._client.num_open:
            self._last_step = self._last_progress = now
        elif self._has_computed(now):
            self._last_progress = now
        self._looked = now
        quiet = now - self._last_step
        stalled = now - self._last_progress > self._timeout or quiet > PATIENCE * self._timeout > 0
        return quiet if stalled else None

    async def watch(self) -> None:
        """Look regularly until cancelled; the log tells when a stall begins and when it is over."""
        told = False
        while True:
            quiet = self.stalled_for()
            if quiet is not None and not told:
                log.error(
                    "the engine has not made a step for %.0f s with %d open requests; /livez answers 503",
                    quiet,
                    self._client.num_open,
                )
            elif quiet is None and told:
                log.warning("the engine makes steps again")
            told = quiet is not None
            await asyncio.sleep(min(MOST_SECONDS_BETWEEN_LOOKS, self._timeout / 4 or MOST_SECONDS_BETWEEN_LOOKS))

    def _on_step(self, _: StepOutputs) -> None:
        self._last_step = self._last_progress = self._clock()

    def _has_computed(self, now: float) -> bool:
        """Whether the engine used its CPU since the last look. A waiting GPU's host thread spins, so there it says nothing."""
        info = self._client.info
        if info is None or not info.device.startswith("cpu"):
            return False
        before, self._cpu = self._cpu, self._client.cpu_seconds()
        if before is None or self._cpu is None:
            return False
        return self._cpu - before > BUSY * (now - self._looked)
