"""How cost grows with load (goal P13): planning time by running requests and context, step time by batch and context.

    python benchmarks/growth.py plan --out FILE                   the scheduler alone, no model, any machine
    python benchmarks/growth.py step MODEL --out FILE             decode steps of an engine, on the device it is served on
    python benchmarks/growth.py draw FILE                         the plot, beside the file; needs matplotlib

Owns the grids, the fits and the plots.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pegainfer_core.engine import Engine, StepReport
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.messages import AddRequest
from pegainfer_core.plan import RowResult, StepPlan, StepResult
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_server.bench.plot import caption, save
from pegainfer_server.bench.provenance import provenance
from pegainfer_server.bench.report import document, finish, show
from pegainfer_server.bench.samples import summarize
from pegainfer_server.bench.workload import Point, prompts

PAGE_SIZE = 16
VOCABULARY = range(16, 32000)
RUNNING = (1, 8, 32, 64, 128, 256, 512)
CONTEXTS = (128, 2048, 8192)
STEPS = 64
SETTLE = 8
PLAN_COLUMNS = (
    ("running", "running"),
    ("context", "context"),
    ("plan us p50", "plan_us.p50"),
    ("p99", "plan_us.p99"),
    ("commit us p50", "commit_us.p50"),
    ("plan us/request", "plan_us_per_request"),
    ("commit us/request", "commit_us_per_request"),
)
STEP_COLUMNS = (
    ("rows", "rows"),
    ("context", "context"),
    ("step ms p50", "step_ms.p50"),
    ("KV MB read", "kv_mb"),
    ("line ms", "line_ms"),
    ("off by", "deviation"),
)


class InstantRunner:
    """Chooses token 7 for every row that samples, in no time."""

    def launch(self, plan: StepPlan) -> InstantStep:
        """See StepRunner."""
        return InstantStep(plan)

    def prepare_more(self) -> bool:
        """See StepRunner."""
        return False


class InstantStep:
    """A step that is done."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def settle(self) -> None:
        """See LaunchedStep."""

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        return StepResult(rows=[RowResult(token_id=7 if row.samples else None) for row in self._plan.rows])


def plan_figures(running: int, context: int, steps: int = STEPS) -> dict[str, Any]:
    """Times of planning and committing decode steps with `running` requests that have `context` tokens each."""
    output_tokens = steps + SETTLE + 2
    length = context + output_tokens
    limits = SchedulerLimits(
        max_model_len=length,
        max_prefill_tokens=running * context,
        max_running_requests=running,
        max_waiting_requests=running,
        vocab_size=VOCABULARY.stop,
        eos_token_ids=frozenset({0}),
    )
    reports: list[StepReport] = []
    # a watermark of 1 % of the pages is kept free at admission
    pages = round(1.05 * running * -(-length // PAGE_SIZE)) + 2
    engine = Engine(Scheduler(limits, KVCache(pages, PAGE_SIZE)), InstantRunner(), observers=[reports.append])
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    point = Point(
        mode="closed",
        load=running,
        input_tokens=context,
        output_tokens=output_tokens,
        num_requests=running,
        seed=(running, context),
    )
    for index, prompt in enumerate(prompts(point, VOCABULARY)):
        engine.add(AddRequest(f"request-{index}", prompt, params))
    while not reports or reports[-1].num_decode_rows < running:
        engine.step()
        assert engine.has_work, "all requests decode together before the first one ends"
    for _ in range(SETTLE // 2):
        engine.step()
    reports.clear()
    for _ in range(steps):
        engine.step()
    assert all(report.num_decode_rows == running for report in reports), "every counted step is a full decode step"
    plan = summarize([report.plan_seconds for report in reports], scale=1e6)
    commit = summarize([report.commit_seconds for report in reports], scale=1e6)
    assert plan is not None and commit is not None
    return {
        "running": running,
        "context": context,
        "plan_us": plan,
        "commit_us": commit,
        "plan_us_per_request": round(plan["p50"] / running, 4),
        "commit_us_per_request": round(commit["p50"] / running, 4),
    }


def step_figures(
    model: str, rows: Sequence[int], contexts: Sequence[int], steps: int, flags: Sequence[str]
) -> dict[str, Any]:
    """Decode steps of an engine over a grid, and how far each is from a straight line in batch x context."""
    import msgspec
    from pegainfer_core.config import EngineConfig
    from pegainfer_core.startup import start_engine
    from pegainfer_server.bench.step_bench import measure_steps, prepare_engine

    settings = dict(flag.split("=", 1) for flag in flags)
    config = msgspec.convert({"model": model, "prefix_cache": False, **settings}, EngineConfig, strict=False)
    engine, info = start_engine(config, lambda progress: None)
    prepare_engine(engine)
    token_bytes = info.kv_cache_bytes / (info.num_pages * info.page_size)
    figures = []
    for count, context in itertools.product(rows, contexts):
        if count * (context + 2 * steps + 64) > info.num_pages * info.page_size:
            continue
        output_tokens = steps + 64 + count * context // info.max_prefill_tokens
        point = Point(
            mode="closed",
            load=count,
            input_tokens=context,
            output_tokens=output_tokens,
            num_requests=count,
            seed=(count, context),
        )
        many = prompts(point, range(min(1000, info.vocab_size // 2), min(32000, info.vocab_size)))
        measured = measure_steps(engine, many, output_tokens, steps, 0)
        figures.append(measured | {"kv_mb": round(count * (context + steps / 2) * token_bytes / 1e6, 3)})
    return {"engine": msgspec.to_builtins(info), "grid": [row for count in rows for row in with_line(figures, count)]}


def with_line(figures: Sequence[dict[str, Any]], rows: int) -> list[dict[str, Any]]:
    """The points of one batch size, each with the step time that a straight line in bytes read gives it."""
    own = [row for row in figures if row["rows"] == rows]
    if len(own) < 3:
        return own
    x = np.array([row["kv_mb"] for row in own])
    y = np.array([row["step_ms"]["p50"] for row in own])
    slope, base = np.polyfit(x, y, 1)
    line = base + slope * x
    return [
        row
        | {"line_ms": round(float(at), 4), "deviation": round(float(abs(value - at) / at), 4)}
        | {"kv_gb_s": round(1.0 / float(slope), 1) if slope > 0 else None}
        for row, at, value in zip(own, line, y, strict=True)
    ]


PLOTS = {
    "growth plan": ("context", "running", "plan_us", "running requests", "planning a decode step, us"),
    "growth step": ("rows", "context", "step_ms", "context, tokens", "decode step, ms"),
}
"""By kind of result: what each line is, what is over and what is up, and their labels."""


def draw(file: Path) -> list[Path]:
    """A line for each context or batch, as PNG and SVG."""
    from matplotlib.figure import Figure

    content = json.loads(file.read_text(encoding="utf-8"))
    by, over, value, right, up = PLOTS[content["kind"]]
    rows = content["grid"]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for name in dict.fromkeys(row[by] for row in rows):
        curve = [row for row in rows if row[by] == name]
        axis.plot([row[over] for row in curve], [row[value]["p50"] for row in curve], marker="o", label=f"{by} {name}")
    axis.set(xlabel=right, ylabel=up)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(caption(content["provenance"]), fontsize=9)
    return save(figure, file.with_suffix(""))


def main() -> None:
    """Measure one of the two, write and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    plan = commands.add_parser("plan")
    step = commands.add_parser("step")
    for command in (plan, step):
        command.add_argument("--out", type=Path, required=True, help="JSON file to write")
        command.add_argument("--steps", type=int, default=STEPS)
    plan.add_argument("--running", type=_integers, default=RUNNING)
    plan.add_argument("--contexts", type=_integers, default=CONTEXTS)
    step.add_argument("model")
    step.add_argument("--rows", type=_integers, default=(1, 32, 64, 128))
    step.add_argument("--contexts", type=_integers, default=(1024, 2048, 4096, 8192))
    step.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="field of EngineConfig")
    commands.add_parser("draw").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "draw":
        print(*draw(arguments.file), sep="\n")
        return
    facts = provenance(f"growth {arguments.what}", vars(arguments))
    if arguments.what == "plan":
        pairs = itertools.product(arguments.contexts, arguments.running)
        rows = [plan_figures(running, context, arguments.steps) for context, running in pairs]
        show("planning", rows, PLAN_COLUMNS)
        finish(document("growth plan", facts, grid=rows), arguments.out)
    else:
        result = step_figures(arguments.model, arguments.rows, arguments.contexts, arguments.steps, arguments.set)
        show("decode steps", result["grid"], STEP_COLUMNS)
        engines = {"pegainfer": result["engine"]}
        finish(document("growth step", facts, engines=engines, grid=result["grid"]), arguments.out)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
