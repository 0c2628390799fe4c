"""The load measurements: points times endpoints, every endpoint with the same prompts and arrivals.

Owns the order: each point is run for one endpoint after the other, after a warm-up of the same shape with other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pegainfer_server.bench.client import Endpoint
from pegainfer_server.bench.load import run_point
from pegainfer_server.bench.report import load_figures
from pegainfer_server.bench.workload import Point, warm_up

OnPoint = Callable[[dict[str, Any]], None]


def closed_points(
    lengths: Sequence[tuple[int, int]], concurrencies: Sequence[int], rounds: int, least: int, seed: int, first: int = 0
) -> list[Point]:
    """A closed-loop point for each shape and concurrency, of `rounds` requests per stream but at least `least`."""
    pairs = [(shape, concurrency) for shape in lengths for concurrency in concurrencies]
    return [
        Point(
            mode="closed",
            load=concurrency,
            input_tokens=shape[0],
            output_tokens=shape[1],
            num_requests=max(least, rounds * concurrency),
            seed=(seed, first + index),
        )
        for index, (shape, concurrency) in enumerate(pairs)
    ]


def open_points(
    lengths: Sequence[tuple[int, int]], rates: Sequence[float], seconds: float, seed: int, first: int = 0
) -> list[Point]:
    """An open-loop point for each shape and rate, of about `seconds` of arrivals."""
    pairs = [(shape, rate) for shape in lengths for rate in rates]
    return [
        Point(
            mode="open",
            load=rate,
            input_tokens=shape[0],
            output_tokens=shape[1],
            num_requests=max(1, round(rate * seconds)),
            seed=(seed, first + index),
        )
        for index, (shape, rate) in enumerate(pairs)
    ]


def run_points(
    endpoints: Sequence[Endpoint],
    points: Sequence[Point],
    token_ids: range,
    *,
    workers: int = 1,
    warm: bool = True,
    keep_itl: bool = False,
    on_point: OnPoint | None = None,
) -> list[dict[str, Any]]:
    """Figures of every point and endpoint."""
    return list(_run(endpoints, points, token_ids, workers, warm, keep_itl, on_point))


def _run(
    endpoints: Sequence[Endpoint],
    points: Sequence[Point],
    token_ids: range,
    workers: int,
    warm: bool,
    keep_itl: bool,
    on_point: OnPoint | None,
) -> Iterator[dict[str, Any]]:
    for point in points:
        for endpoint in endpoints:
            if warm:
                run_point(endpoint, warm_up(point), token_ids)
            result = run_point(endpoint, point, token_ids, workers)
            figures = load_figures(endpoint.name, point, result, keep_itl=keep_itl)
            if on_point is not None:
                on_point(figures)
            yield figures
