"""Percentiles of a sample of times, the same everywhere in a result file.

Owns the summary's shape. Times come in seconds and go out in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 90, 99)
DIGITS = 4

Summary = dict[str, float]
"""mean, min, p50, p90, p99, max and count."""


def summarize(values: Sequence[float], scale: float = 1e3) -> Summary | None:
    """The summary of `values` times `scale`; None without values. Percentiles interpolate linearly, as numpy's default does."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64) * scale
    summary = {"count": len(values), "mean": float(sample.mean()), "min": float(sample.min())}
    for percentile, value in zip(PERCENTILES, np.percentile(sample, PERCENTILES), strict=True):
        summary[f"p{percentile}"] = float(value)
    summary["max"] = float(sample.max())
    return {name: round(value, DIGITS) for name, value in summary.items()}
