"""Does ahead of time what a first start on a machine would pay for: every kernel compiled, every usual graph captured once.

Owns the list of what is done. Compiled kernels stay on disk (`kernel_cache.py`); graphs do not outlive the process, but capturing them
compiles what they need. Imports torch only through the engine's start.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.errors import PegainferError
from pegainfer_core.kernel_cache import KernelCache, triton_cache
from pegainfer_core.messages import AddRequest, EngineInfo, LoadProgress
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.startup import start_engine

LONG_PROMPT = 8_500
"""Past the bound up to which contexts share kernels and graphs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmedUp:
    """What was done."""

    info: EngineInfo
    timeline: list[tuple[str, float]]
    """(phase, seconds): the start's, then "more graphs" and "requests"."""
    before: KernelCache
    after: KernelCache
    num_requests: int
    num_steps: int


def warm_up(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> WarmedUp:
    """Start an engine, make it prepare all it can, and let it compute a few requests. Raises ConfigError and its kinds."""
    before = triton_cache()
    engine, info = start_engine(config, on_progress)
    timeline = list(info.timeline)
    begun = time.perf_counter()
    count = 0
    on_progress(LoadProgress("more graphs", 0, 0))
    while engine.runner.prepare_more():
        count += 1
        on_progress(LoadProgress("more graphs", count, 0))
    captured = time.perf_counter()
    requests = _requests(info)
    for done, request in enumerate(requests):
        on_progress(LoadProgress("requests", done, len(requests)))
        _compute(engine, request)
    on_progress(LoadProgress("requests", len(requests), len(requests)))
    timeline += [("more graphs", captured - begun), ("requests", time.perf_counter() - captured)]
    return WarmedUp(
        info=info,
        timeline=timeline,
        before=before,
        after=triton_cache(),
        num_requests=len(requests),
        num_steps=engine.scheduler.stats().num_steps,
    )


def _requests(info: EngineInfo) -> list[AddRequest]:
    """What runs differently: greedy and sampled rows, logprobs of prompts (never captured), and a long context."""
    longest = min(info.max_model_len, info.num_pages * info.page_size) - 4
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=0, max_tokens=4, ignore_eos=True, logprobs=5)
    echo = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    prompt = [0] * max(1, min(40, longest))
    cases = [(prompt, greedy), (prompt, sampled), (prompt, echo)]
    if info.device.startswith("cuda"):
        cases.append(([0] * max(1, min(LONG_PROMPT, longest)), greedy))
    return [AddRequest(f"warm-up-{index}", prompt, params) for index, (prompt, params) in enumerate(cases)]


def _compute(engine: Engine, request: AddRequest) -> None:
    engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise PegainferError(f"a request of the warm-up failed: {output.error}")
