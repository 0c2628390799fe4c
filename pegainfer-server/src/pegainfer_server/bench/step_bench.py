"""Where the time of a step goes: host time of each act of the step loop, and how long the GPU idles between steps.

Owns an engine in this process, stepped by hand with every request decoding, and stopwatches around its runner. The engine's own
code runs unchanged; what an observer of `pegainfer_step_finished` gets is part of the result.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine, LaunchedStep, StepReport, StepRunner
from pegainfer_core.errors import PegainferError
from pegainfer_core.messages import AddRequest, EngineInfo
from pegainfer_core.plan import StepPlan, StepResult
from pegainfer_core.sampling_params import SamplingParams

from pegainfer_server.bench.device_gaps import device_gaps
from pegainfer_server.bench.report import Columns
from pegainfer_server.bench.samples import summarize
from pegainfer_server.bench.workload import Point, prompts

SETTLE_STEPS = 8
"""Decode steps that are not counted: kernels compile, graphs are captured."""
PREPARE_SECONDS = 30.0
"""Most that the engine gets to prepare itself, as it would while idle."""
NO_WAIT = 20e-6
"""Seconds; a step whose result was there sooner than this after the host asked left the GPU without work."""

STEP_COLUMNS: Columns = (
    ("rows", "rows"),
    ("context", "context"),
    ("step ms p50", "step_ms.p50"),
    ("p99", "step_ms.p99"),
    ("plan ms", "plan_ms.p50"),
    ("launch ms", "launch_ms.p50"),
    ("wait ms", "wait_ms.p50"),
    ("commit ms", "commit_ms.p50"),
    ("emit ms", "rest_ms.p50"),
    ("host share", "host_share"),
    ("GPU idle", "gpu.idle_share"),
)


@dataclasses.dataclass(slots=True)
class Clocks:
    """Seconds of the acts of each counted step."""

    step: list[float] = dataclasses.field(default_factory=list)
    plan: list[float] = dataclasses.field(default_factory=list)
    launch: list[float] = dataclasses.field(default_factory=list)
    wait: list[float] = dataclasses.field(default_factory=list)
    commit: list[float] = dataclasses.field(default_factory=list)


class TimedRunner:
    """A runner with stopwatches."""

    def __init__(self, inner: StepRunner, clocks: Clocks) -> None:
        self._inner = inner
        self._clocks = clocks

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See StepRunner."""
        begun = time.perf_counter()
        launched = self._inner.launch(plan)
        self._clocks.launch.append(time.perf_counter() - begun)
        return _TimedStep(launched, self._clocks)

    def prepare_more(self) -> bool:
        """See StepRunner."""
        return self._inner.prepare_more()


class _TimedStep:
    def __init__(self, inner: LaunchedStep, clocks: Clocks) -> None:
        self._inner = inner
        self._clocks = clocks

    def settle(self) -> None:
        """See LaunchedStep."""
        self._inner.settle()

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        begun = time.perf_counter()
        result = self._inner.wait()
        self._clocks.wait.append(time.perf_counter() - begun)
        return result


def run_steps(
    config: EngineConfig,
    rows: Sequence[int],
    *,
    input_tokens: int,
    steps: int,
    seed: int,
    token_ids: range,
    traced_steps: int,
) -> tuple[list[dict[str, Any]], EngineInfo]:
    """Figures of decode steps for each number of rows. Raises PegainferError if that many requests do not run together."""
    from pegainfer_core.startup import start_engine

    engine, info = start_engine(config, lambda progress: None)
    prepare_engine(engine)
    results = []
    for count in rows:
        point = Point(
            mode="closed",
            load=count,
            input_tokens=input_tokens,
            output_tokens=steps + traced_steps + 4 * SETTLE_STEPS + count * input_tokens // info.max_prefill_tokens,
            num_requests=count,
            seed=(seed, count),
        )
        results.append(measure_steps(engine, prompts(point, token_ids), point.output_tokens, steps, traced_steps))
    return results, info


def prepare_engine(engine: Engine) -> None:
    """Let it prepare itself, as it would while it has nothing to do."""
    until = time.monotonic() + PREPARE_SECONDS
    while time.monotonic() < until and engine.runner.prepare_more():
        pass


def measure_steps(
    started: Engine, many: Sequence[list[int]], output_tokens: int, steps: int, traced_steps: int
) -> dict[str, Any]:
    """Figures of decode steps in which all of these prompts decode together. The engine is idle before and after."""
    clocks = Clocks()
    reports: list[StepReport] = []
    engine = Engine(
        started.scheduler,
        TimedRunner(started.runner, clocks),
        run_ahead=started.run_ahead,
        observers=[reports.append],
    )
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    names = [f"bench-{index}" for index in range(len(many))]
    for name, prompt in zip(names, many, strict=True):
        engine.add(AddRequest(name, prompt, params))
    _until_all_decode(engine, reports, len(many))
    for _ in range(SETTLE_STEPS):
        engine.step()
    clocks.launch.clear()
    clocks.wait.clear()
    reports.clear()
    for _ in range(steps):
        begun = time.perf_counter()
        engine.step()
        clocks.step.append(time.perf_counter() - begun)
    if any(report.num_decode_rows != len(many) for report in reports):
        raise PegainferError(f"not every step had {len(many)} decode rows; lower --rows or raise the KV cache")
    clocks.plan = [report.plan_seconds for report in reports]
    clocks.commit = [report.commit_seconds for report in reports]
    figures = step_figures(clocks, rows=len(many), context=len(many[0]))
    if traced_steps:
        figures["gpu"] = _trace(engine.step, traced_steps, figures["step_ms"]["mean"])
    engine.abort(names)
    while engine.has_work:
        engine.step()
    return figures


def step_figures(clocks: Clocks, *, rows: int, context: int) -> dict[str, Any]:
    """Summaries of the acts; `host_share` is the part of the time in which the host worked rather than waited."""
    launch, wait = clocks.launch, clocks.wait
    total = sum(clocks.step)
    waited = sum(wait)
    known = zip(clocks.step, clocks.plan, launch, wait, clocks.commit, strict=False)
    return {
        "rows": rows,
        "context": context,
        "steps": len(clocks.step),
        "step_ms": summarize(clocks.step),
        "plan_ms": summarize(clocks.plan),
        "launch_ms": summarize(launch),
        "wait_ms": summarize(wait),
        "commit_ms": summarize(clocks.commit),
        "rest_ms": summarize([max(0.0, step - sum(acts)) for step, *acts in known]),
        "host_share": round(1.0 - waited / total, 4) if total else None,
        "steps_without_wait": sum(seconds < NO_WAIT for seconds in wait),
    }


def _until_all_decode(engine: Engine, reports: list[StepReport], rows: int) -> None:
    while engine.has_work:
        engine.step()
        if reports and reports[-1].num_decode_rows == rows == reports[-1].num_rows:
            return
        if reports and reports[-1].stats.num_running < rows and not reports[-1].stats.num_waiting:
            break
    raise PegainferError(
        f"{rows} requests never ran together; lower --rows, or raise --max-running-requests or the KV cache"
    )


def _trace(step: Callable[[], object], count: int, step_ms: float) -> dict[str, Any] | None:
    """GPU times of `count` further steps under a profiler; None where there is no GPU."""
    from pegainfer_core.device_trace import trace_steps

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace_steps(step, count, file)
        gaps = device_gaps(file)
    if gaps is None:
        return None
    busy_ms = gaps["busy_us"] / 1e3 / count
    return {
        **gaps,
        "steps": count,
        "busy_ms_per_step": round(busy_ms, 4),
        "busy_share_untraced": round(busy_ms / step_ms, 4),
    }
