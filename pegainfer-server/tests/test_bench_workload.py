"""Random prompts and arrivals: distinct, reproducible, and the same for every engine. Percentiles of samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from pegainfer_server.bench.samples import summarize
from pegainfer_server.bench.serve_bench import closed_points, open_points
from pegainfer_server.bench.workload import Point, arrivals, prompts, warm_up

IDS = range(100, 400)


def closed(num_requests: int = 20, number: int = 0) -> Point:
    return Point(mode="closed", load=4, input_tokens=8, output_tokens=4, num_requests=num_requests, seed=(7, number))


def poisson(rate: float, num_requests: int, seed: int = 3) -> Point:
    return Point(mode="open", load=rate, input_tokens=8, output_tokens=4, num_requests=num_requests, seed=(seed, 0))


def test_prompts_are_distinct_and_of_the_given_length_and_ids() -> None:
    many = prompts(closed(200), IDS)
    assert len({tuple(prompt) for prompt in many}) == 200
    assert {len(prompt) for prompt in many} == {8}
    assert {token_id for prompt in many for token_id in prompt} <= set(IDS)


def test_prompts_depend_on_seed_and_number_of_the_point_only() -> None:
    assert prompts(closed(), IDS) == prompts(closed(), IDS)
    first, second = prompts(closed(), IDS), prompts(closed(number=1), IDS)
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in second}


def test_even_prompts_of_one_token_are_distinct() -> None:
    point = dataclasses.replace(closed(50), input_tokens=1)
    assert sorted(prompt[0] for prompt in prompts(point, range(50))) == list(range(50))
    with pytest.raises(ValueError, match="fewer than 50 different prompts"):
        prompts(point, range(49))


def test_warm_up_shares_no_prompt_with_its_point() -> None:
    point = closed()
    warm = warm_up(point)
    assert (warm.num_requests, warm.concurrency, warm.output_tokens) == (4, 4, 4)
    assert not {tuple(prompt) for prompt in prompts(warm, IDS)} & {tuple(prompt) for prompt in prompts(point, IDS)}
    assert warm_up(poisson(5.0, 100)).concurrency == 5


def test_arrivals_are_a_poisson_process_fixed_by_the_seed() -> None:
    times = arrivals(poisson(50.0, 20_000))
    assert times == arrivals(poisson(50.0, 20_000))
    assert times != arrivals(poisson(50.0, 20_000, seed=4))
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    # of an exponential distribution, mean and deviation are equal; the seed makes this the same on every run
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)


def test_points_of_a_run_are_numbered() -> None:
    points = closed_points([(8, 4), (16, 2)], [1, 8], rounds=3, least=5, seed=9)
    points += open_points([(8, 4)], [2.5], seconds=10.0, seed=9, first=len(points))
    assert [point.seed for point in points] == [(9, index) for index in range(5)]
    assert [point.num_requests for point in points] == [5, 24, 5, 24, 25]
    assert [point.label for point in points] == ["1 at once", "8 at once", "1 at once", "8 at once", "2.5 requests/s"]


def test_summary_of_known_values() -> None:
    summary = summarize([value / 1000 for value in range(1, 102)])
    assert summary == {"count": 101, "mean": 51.0, "min": 1.0, "p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 101.0}
    assert summarize([2.0, 4.0], scale=1.0) == {
        "count": 2,
        "mean": 3.0,
        "min": 2.0,
        "p50": 3.0,
        "p90": 3.8,
        "p99": 3.98,
        "max": 4.0,
    }
    assert summarize([]) is None
