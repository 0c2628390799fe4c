"""What chunk sizes beside decode rows give for throughput and latency, simulated: the scheduler as it is, with steps of measured length.

Owns the simulation. A step takes what mixed_steps_gpu.py measured for its decode rows and tokens, padded as the engine pads them; prompts
have half of 1,024 tokens before them there, so shares of prompts of 1,024 come out 5 to 10 % too slow. No GPU is needed.

    python benchmarks/chunk_policy.py --steps benchmarks/results/2026-12-01-h200-mixed-steps.json
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from pegainfer_core import scheduler, step_sizes
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.messages import AddRequest
from pegainfer_core.plan import RowResult, StepPlan, StepResult
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from rich.console import Console
from rich.table import Table

HOST_MS = 0.05
"""Between two steps."""
LOADS = ((8, 1024, 128), (32, 1024, 128), (64, 1024, 128), (128, 1024, 128), (32, 3500, 64))
"""Closed loops: (streams, prompt, output)."""
ROUNDS = 4
RATES = (16.0, 32.0)
SECONDS = 20.0


class StepTimes:
    """Milliseconds of a step, between measured ones along straight lines."""

    def __init__(self, path: Path) -> None:
        self._by_rows: dict[int, dict[int, float]] = {}
        for step in json.loads(path.read_text(encoding="utf-8"))["steps"]:
            self._by_rows.setdefault(step["decode_rows"], {})[step["tokens"]] = step["us"] / 1000

    def __call__(self, plan: StepPlan) -> float:
        """Of this plan, padded."""
        rows = sum(row.num_tokens == 1 for row in plan.rows)
        prompt_tokens = sum(row.num_tokens for row in plan.rows) - rows
        if not prompt_tokens:
            return _between({rows: self._by_rows[rows][rows] for rows in self._by_rows if rows}, rows)
        padded = step_sizes.at_least(step_sizes.MIXED_DECODE_ROWS, rows)
        total = step_sizes.at_least(step_sizes.MIXED_TOKENS, padded + prompt_tokens)
        mixed = {
            rows: _between({tokens: took for tokens, took in times.items() if tokens > rows}, total)
            for rows, times in self._by_rows.items()
        }
        return _between(mixed, rows)


def _between(points: Mapping[int, float], at: int) -> float:
    known = sorted(points)
    if at in points or at < known[0]:
        return points[max(at, known[0])]
    if at > known[-1]:
        return points[known[-1]] * at / known[-1]
    place = bisect.bisect_left(known, at)
    low, high = known[place - 1], known[place]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


def simulate(times: StepTimes, prompt: int, output: int, arrivals: Sequence[float], streams: int) -> dict[str, float]:
    """Requests that arrive at these milliseconds, each followed at its end by another one until `ROUNDS` x `streams` were sent."""
    limits = SchedulerLimits(
        max_model_len=8192,
        max_prefill_tokens=3200,
        spread_prefill=True,
        max_running_requests=256,
        max_waiting_requests=10_000,
        vocab_size=100,
        eos_token_ids=frozenset(),
    )
    planner = Scheduler(limits, KVCache(60_000, 16, False))
    waiting = list(arrivals)
    total = max(len(arrivals), streams * ROUNDS)
    now = 0.0
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []

    def send() -> None:
        name = str(len(sent))
        sent[name] = now
        planner.add(AddRequest(name, [7] * prompt, SamplingParams(max_tokens=output, temperature=0.0)))

    while len(sent) < total or planner.has_requests:
        while waiting and waiting[0] <= now:
            waiting.pop(0)
            send()
        plan = planner.plan()
        if plan is None:
            now = waiting[0]
            continue
        now += times(plan) + HOST_MS
        result = StepResult(rows=[RowResult(token_id=5 if row.samples else None) for row in plan.rows])
        for event in planner.commit(result):
            name = event.request_id
            if name in last:
                gaps.append(now - last[name])
            else:
                first[name] = now - sent[name]
            last[name] = now
            if event.finish_reason and streams and len(sent) < total:
                send()
    each = sorted((last[name] - sent[name] - first[name]) / (output - 1) for name in sent)
    return {
        "tok/s": total * output / now * 1000,
        "TTFT p50": _percentile(sorted(first.values()), 0.5),
        "TTFT p99": _percentile(sorted(first.values()), 0.99),
        "TPOT p50": _percentile(each, 0.5),
        "ITL p99": _percentile(sorted(gaps), 0.99),
    }


def _percentile(values: Sequence[float], part: float) -> float:
    return values[min(int(len(values) * part), len(values) - 1)]


def poisson(rate: float) -> list[float]:
    """Milliseconds of arrivals."""
    generator = random.Random(13)
    gaps = (generator.expovariate(rate) * 1000 for _ in itertools.count())
    return list(itertools.takewhile(lambda at: at < SECONDS * 1000, itertools.accumulate(gaps)))


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True, help="what mixed_steps_gpu.py wrote")
    options = parser.parse_args()
    times = StepTimes(options.steps)
    columns = ("tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p99")
    table = Table("backlog steps", "tokens", "a row", "load", *columns, title="simulated; times in ms")
    for backlog, riding, per_row in ((4, 256, 4), (16, 256, 4), (64, 128, 8), (64, 256, 8), (1 << 20, 256, 8)):
        with (
            mock.patch.object(step_sizes, "BACKLOG_STEPS", backlog),
            mock.patch.object(scheduler, "BACKLOG_STEPS", backlog),
            mock.patch.object(step_sizes, "RIDING_TOKENS", riding),
            mock.patch.object(step_sizes, "RIDING_TOKENS_PER_ROW", per_row),
        ):
            found = {
                f"{prompt}/{output} x {streams}": simulate(times, prompt, output, [0.0] * streams, streams)
                for streams, prompt, output in LOADS
            }
            found |= {f"1024/128, {rate:g}/s": simulate(times, 1024, 128, poisson(rate), 0) for rate in RATES}
        for load, row in found.items():
            table.add_row(str(backlog), str(riding), str(per_row), load, *(f"{row[name]:,.4g}" for name in columns))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
