"""How many requests a caller may send: a token bucket for each API key, or for each client address where there are no keys.

Owns the counting. Knows nothing of HTTP. A bucket holds one minute's worth, so short bursts pass.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MOST_CALLERS = 10_000
"""Callers remembered; the one seen longest ago is forgotten first, which only gives it a full bucket."""


class RateLimit:
    """At most `per_minute` requests of each caller, refilled evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = float(per_minute)
        self._per_second = per_minute / 60.0
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Caller to (tokens left, when that was), the least recently seen first."""

    def seconds_to_wait(self, caller: str) -> float:
        """0.0 and one token taken, or how long until there is one."""
        now = self._clock()
        tokens, seen = self._buckets.pop(caller, (self._burst, now))
        tokens = min(self._burst, tokens + (now - seen) * self._per_second)
        allowed = tokens >= 1.0
        self._buckets[caller] = (tokens - 1.0 if allowed else tokens, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - tokens) / self._per_second
