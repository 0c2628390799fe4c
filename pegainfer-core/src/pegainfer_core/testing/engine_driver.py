"""An engine stepped by hand in this thread: requests in, all their tokens out, the same on every run.

Owns the loop over `Engine.step` and the collection of outputs. For tests; `LLM` is what programs use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pegainfer_core.config import EngineConfig
from pegainfer_core.messages import AddRequest, EngineStats, FinishReason, RequestOutput, TokenLogprob
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.startup import start_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
"""24 tokens with their logprobs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one request gave."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_cached_tokens: int
    finish_reason: FinishReason


class EngineDriver:
    """The engine of a checkpoint; `settings` are fields of EngineConfig."""

    def __init__(self, path: Path, **settings: Any) -> None:
        config = EngineConfig(model=str(path), **settings)
        self.engine, self.info = start_engine(config, lambda progress: None)
        self.stats = EngineStats()
        """As of the last step."""
        self._num_requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[Generated]:
        """Submit all prompts, then step until all have ended."""
        return self.generate_each([(prompt, params) for prompt in prompts])

    def generate_each(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        on_end: Callable[[int], None] = lambda index: None,
        arrives: Callable[[], bool] = lambda: True,
        aborts: Callable[[], bool] = lambda: False,
    ) -> list[Generated]:
        """The same for prompts with parameters of their own. `on_end` hears which request ended.

        Before each step requests are submitted for as long as `arrives` says so, and a running one is aborted if `aborts` says so.
        """
        outputs: dict[str, list[RequestOutput]] = {}
        coming = list(requests)
        while coming or self.engine.has_work:
            while coming and (arrives() or not self.engine.has_work):
                prompt, params = coming.pop(0)
                self._num_requests += 1
                request_id = f"request-{self._num_requests}"
                outputs[request_id] = []
                self.engine.add(AddRequest(request_id=request_id, prompt_ids=list(prompt), params=params))
            if self.engine.scheduler.running and aborts():
                self.engine.abort([self.engine.scheduler.running[0].request_id])
            step = self.engine.step()
            self.stats = step.stats
            for output in step.outputs:
                outputs[output.request_id].append(output)
                if output.finish_reason is not None:
                    on_end(list(outputs).index(output.request_id))
        return [_collect(parts) for parts in outputs.values()]


def _collect(parts: Sequence[RequestOutput]) -> Generated:
    assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True], (
        "ends exactly once"
    )
    last = parts[-1]
    assert last.finish_reason is not None
    assert last.error is None, last.error
    return Generated(
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs or []],
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        num_cached_tokens=next((part.num_cached_tokens for part in parts if part.num_cached_tokens is not None), 0),
        finish_reason=last.finish_reason,
    )
