"""What is asked of an engine at one point of a measurement: random prompts, lengths and arrivals, all from one seed.

Owns reproducibility: a point gives the same prompts and the same arrivals for every engine. Knows nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

Mode = Literal["closed", "open"]

PROMPTS, ARRIVALS = 0, 1
"""Streams of random numbers of one seed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: requests of one shape, at a fixed concurrency (closed loop) or with Poisson arrivals (open loop)."""

    mode: Mode
    load: float
    """Closed: requests in flight. Open: requests a second."""
    input_tokens: int
    output_tokens: int
    num_requests: int
    seed: tuple[int, int]
    """Of the run, and the point's number in it: no two points of a run share a prompt."""

    @property
    def concurrency(self) -> int:
        """Requests in flight of a closed loop."""
        assert self.mode == "closed", "an open loop has no fixed concurrency"
        return int(self.load)

    @property
    def label(self) -> str:
        """The load in words."""
        return f"{int(self.load)} at once" if self.mode == "closed" else f"{self.load:g} requests/s"

    def as_json(self) -> dict[str, Any]:
        """The fields, for a result file."""
        return {**dataclasses.asdict(self), "seed": list(self.seed)}


def warm_up(point: Point, output_tokens: int = 8) -> Point:
    """A small version of the point with prompts of its own, to be run and forgotten before it."""
    count = point.concurrency if point.mode == "closed" else max(1, round(point.load))
    return dataclasses.replace(
        point,
        mode="closed",
        load=count,
        num_requests=count,
        output_tokens=min(output_tokens, point.output_tokens),
        seed=(point.seed[0], point.seed[1] + 2**31),
    )


def prompts(point: Point, token_ids: range) -> list[list[int]]:
    """Prompts of random ids in `token_ids`, all different. Raises ValueError if there are not that many different ones."""
    if point.num_requests > len(token_ids) ** min(point.input_tokens, 64):
        raise ValueError(f"{len(token_ids)} token ids give fewer than {point.num_requests} different prompts")
    generator = np.random.default_rng([*point.seed, PROMPTS])
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < point.num_requests:
        drawn = generator.integers(token_ids.start, token_ids.stop, size=point.input_tokens)
        chosen[tuple(drawn.tolist())] = None
    return [list(prompt) for prompt in chosen]


def arrivals(point: Point) -> list[float]:
    """Seconds after the start at which the requests of an open loop are sent: a Poisson process, the first one at 0."""
    assert point.mode == "open", "a closed loop sends when a request ends"
    generator = np.random.default_rng([*point.seed, ARRIVALS])
    gaps = generator.exponential(1.0 / point.load, size=point.num_requests)
    gaps[0] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times
