"""A histogram cheap enough for the per-token path, in prometheus-client's exposition.

Owns counting only. The event loop is the only writer, so it needs no lock, which is most of what prometheus-client's own costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(step * 10**power) for power in range(5) for step in (1, 2, 5))
STEP_TOKEN_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
ACT_BUCKETS = (1e-05, 2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
CHOICE_COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
HTTP_BUCKETS = (0.1, 0.5, 1.0)


class Histogram:
    """Counts of values by bucket (upper bounds inclusive), and their sum."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Append this histogram's samples to `family`."""
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(cumulative)))
        family.add_metric(list(labels), buckets, sum_value=self._sum)
