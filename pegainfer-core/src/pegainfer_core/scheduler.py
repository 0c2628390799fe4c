"""Decides which tokens run next, and applies what came of it.

Knows requests, pages and token counts; knows nothing of tensors, text or HTTP. `plan` may be called again before the plan before it is
committed (run-ahead). Invariant: every request ends exactly once, and a request's pages cover the tokens it is planned to write.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
import time
from array import array
from collections import deque
from collections.abc import Sequence

from pegainfer_core.errors import RequestError
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.kv.slots import SlotPool
from pegainfer_core.messages import AddRequest, EngineStats, FinishReason, RequestOutput, TokenLogprob
from pegainfer_core.plan import Join, Row, RowResult, StepPlan, StepResult
from pegainfer_core.request import Request
from pegainfer_core.step_sizes import BACKLOG_STEPS, prompt_tokens_beside


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What bounds the scheduler, all resolved."""

    max_model_len: int
    max_prefill_tokens: int
    """Prompt tokens per step, at most. Rows that need a single token do not count: they are always served."""
    spread_prefill: bool = False
    """Whether a step with single-token rows takes fewer prompt tokens (step_sizes.py)."""
    max_running_requests: int
    max_waiting_requests: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    seed: int = 0


class Scheduler:
    """First come, first served within a priority; single-token rows first; the youngest is preempted when pages run out."""

    def __init__(self, limits: SchedulerLimits, cache: KVCache) -> None:
        self.limits = limits
        self.cache = cache
        self.slots = SlotPool(limits.max_running_requests)
        self.waiting: list[Request] = []
        """Sorted by `Request.order`."""
        self.running: list[Request] = []
        """In order of admission."""
        self._open: dict[str, Request] = {}
        self._in_flight: deque[tuple[StepPlan, list[tuple[Request, int]]]] = deque()
        """Launched plans, oldest first, with the requests of their rows and the epochs those had."""
        self._random = random.Random(limits.seed)
        self._arrivals = 0
        self._steps = 0
        self._watermark = cache.pool.num_usable // 100
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request is open."""
        return bool(self._open)

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request; returns its end at once if it is refused."""
        try:
            self._validate(message)
        except RequestError as error:
            return rejected(message.request_id, error)
        room = self.limits.max_model_len - len(message.prompt_ids)
        wanted = message.params.max_tokens
        seed = message.params.seed
        request = Request(
            message,
            arrival=self._arrivals,
            arrived_at=time.monotonic(),
            seed=self._random.getrandbits(63) if seed is None else seed,
            max_tokens=room if wanted is None else wanted,
        )
        self._arrivals += 1
        self._open[request.request_id] = request
        self._enqueue(request)
        return None

    def abort(self, request_ids: list[str]) -> list[RequestOutput]:
        """End these requests; unknown ids are none of ours any more."""
        open_requests = [self._open[request_id] for request_id in request_ids if request_id in self._open]
        return [self._finish(request, "abort") for request in open_requests]

    def _validate(self, message: AddRequest) -> None:
        """Raise RequestError for what could never run, or has no place in the queue."""
        prompt_ids, params, vocab_size = message.prompt_ids, message.params, self.limits.vocab_size
        if message.request_id in self._open:
            raise RequestError(f"request id {message.request_id!r} is already in use")
        if not prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if not _are_below(prompt_ids, vocab_size):
            bad = next(token_id for token_id in prompt_ids if not 0 <= token_id < vocab_size)
            raise RequestError(f"token id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param="prompt")
        thinking = params.thinking
        marks = (
            ()
            if thinking is None
            else (thinking.end_id, thinking.end_id if thinking.start_id is None else thinking.start_id)
        )
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("thinking", marks),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param=name
                    )
        self._validate_length(len(prompt_ids), params.max_tokens)
        if len(self.waiting) >= self.limits.max_waiting_requests + self.slots.num_free:
            raise RequestError(f"{len(self.waiting)} requests are waiting already; try again later", code="queue_full")

    def _validate_length(self, num_prompt: int, max_tokens: int | None) -> None:
        limit = self.limits.max_model_len
        needs_room = 0 if max_tokens == 0 else 1
        if num_prompt + needs_room > limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; this model's context is {limit} tokens, prompt and output together",
                code="context_length_exceeded",
                param="prompt",
            )
        if max_tokens is not None and num_prompt + max_tokens > limit:
            raise RequestError(
                f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) exceed this model's context of {limit} tokens",
                code="context_length_exceeded",
                param="max_tokens",
            )
        # The last sampled token is never written, so it needs no page.
        longest = max(num_prompt, num_prompt + (limit - num_prompt if max_tokens is None else max_tokens) - 1)
        if longest > self.cache.num_token_capacity:
            raise RequestError(
                f"the request may need {longest} tokens of KV cache; there are {self.cache.num_token_capacity} "
                "(raise --kv-cache-memory or lower max_tokens)",
                code="kv_budget_exceeded",
            )

    def _enqueue(self, request: Request) -> None:
        request.status = "waiting"
        bisect.insort(self.waiting, request, key=lambda waiting: waiting.order)

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now. Planned tokens count as computed from here on."""
        joins: list[Join] = []
        rows: list[tuple[Request, Row]] = []
        for request in list(self.running):
            if request.num_remaining == 1 and self._may_advance(request):
                self._plan_row(request, 1, rows)
        budget = self._prefill_budget(len(rows))
        for request in list(self.running):
            if request.num_remaining > 1 and budget and self._may_advance(request):
                budget -= self._plan_row(request, min(request.num_remaining, budget), rows)
        while budget and (admitted := self._admit()) is not None:
            joins.append(_join(admitted))
            budget -= self._plan_row(admitted, min(admitted.num_remaining, budget), rows)
        if not rows:
            return None
        rows.sort(key=lambda pair: pair[1].num_tokens > 1)  # stable: single-token rows lead
        self._steps += 1
        plan = StepPlan(index=self._steps, joins=joins, rows=[row for _, row in rows])
        self._in_flight.append((plan, [(request, request.epoch) for request, _ in rows]))
        return plan

    def _prefill_budget(self, decode_rows: int) -> int:
        """Prompt tokens of a step with so many single-token rows."""
        most = self.limits.max_prefill_tokens
        if not self.limits.spread_prefill:
            return most
        backlog = sum(request.num_remaining for request in self.running if request.num_remaining > 1)
        for request in self.waiting:
            if backlog >= BACKLOG_STEPS * most:
                break
            backlog += request.num_known
        return prompt_tokens_beside(decode_rows, backlog, most)

    def _may_advance(self, request: Request) -> bool:
        """Whether the next token can be planned now."""
        if request.status != "running":
            return False  # preempted earlier in this plan
        if not request.num_pending:
            return True
        return request.num_output + request.num_pending < request.max_tokens  # else its last token is in flight

    def _plan_row(self, request: Request, num_tokens: int, rows: list[tuple[Request, Row]]) -> int:
        """Reserve pages, preempting the youngest if the pool is dry, and append the row. Returns the tokens planned."""
        start = request.num_computed
        end = start + num_tokens
        snapshots = self.cache.snapshots
        if snapshots is not None and num_tokens > 1:
            end = snapshots.row_end(request, end)
            num_tokens = end - start
        while self.cache.extend(request, end) is None:
            planned = {id(other) for other, _ in rows}
            victim = max((r for r in self.running if id(r) not in planned), key=lambda r: r.order)
            self._preempt(victim)
            if victim is request:
                return 0
        samples = end == request.num_known + request.num_pending and request.max_tokens > 0
        row = Row(
            slot=request.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=request.token_ids[start:end].tolist(),
            new_pages=request.pages[request.num_planned_pages :],
            samples=samples,
            output_index=request.num_output + request.num_pending,
            prompt_logprobs=request.wants_prompt_logprobs,
            snapshot=None if snapshots is None else snapshots.reserve(request, end),
        )
        assert len(row.token_ids) >= num_tokens - 1, "at most the last input is still on the device"
        request.num_planned_pages = len(request.pages)
        request.num_computed = end
        request.num_pending += samples
        rows.append((request, row))
        return num_tokens

    def _admit(self) -> Request | None:
        """Move the first waiting request to the running ones if a slot and all its pages, with some to spare, are there."""
        if not self.waiting or not self.slots.num_free:
            return None
        request = self.waiting[0]
        matched = self.cache.match(request)
        pages = matched.pages
        need = self.cache.num_pages_for(request.num_known) - len(pages) + self.cache.pool.num_unheld(pages)
        promised = sum(max(0, self.cache.num_pages_for(r.num_known) - len(r.pages)) for r in self.running)
        spare = self._watermark if self.running else 0
        if need + promised + spare > self.cache.pool.num_free:
            return None
        del self.waiting[0]
        self.running.append(request)
        request.status = "running"
        request.slot = self.slots.allocate()
        self.cache.attach(request, matched)
        if request.admitted_at is None:
            request.admitted_at = time.monotonic()
            request.num_cached = request.num_computed
            self._prompt_tokens += request.num_prompt
            self._cached_tokens += request.num_computed
        return request

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it is computed again later, and gives the same tokens."""
        self._preemptions += 1
        if request.wants_prompt_logprobs:
            request.prompt_logprobs = [None]
        self._leave(request)
        self._enqueue(request)

    def _leave(self, request: Request) -> None:
        """Give back slot and pages, and void what was launched for the request."""
        if request.status == "running":
            self.running.remove(request)
            self.slots.release(request.slot)
            self.cache.free(request)
        elif request.status == "waiting":
            self.waiting.remove(request)
        request.slot = -1
        request.num_pending = 0
        request.epoch += 1

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Apply the results of the oldest launched plan. Rows of requests that were preempted or ended since are dropped."""
        plan, owners = self._in_flight.popleft()
        outputs: list[RequestOutput] = []
        for (request, epoch), row, row_result in zip(owners, plan.rows, result.rows, strict=True):
            if request.epoch == epoch:
                output = self._commit_row(request, row, row_result)
                if output is not None:
                    outputs.append(output)
            else:
                self.cache.void(row.snapshot)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[RequestOutput]:
        """End the requests of a plan whose step raised; nothing it wrote was registered."""
        entry = next(entry for entry in self._in_flight if entry[0] is plan)
        self._in_flight.remove(entry)
        for row in plan.rows:
            self.cache.void(row.snapshot)
        return [self._finish(request, "error", error=message) for request, epoch in entry[1] if request.epoch == epoch]

    def _commit_row(self, request: Request, row: Row, result: RowResult) -> RequestOutput | None:
        request.num_pending -= row.samples
        if result.error is not None:
            self.cache.void(row.snapshot)
            self.cache.distrust(request)
            return self._finish(request, "error", error=result.error)
        end = row.start + row.num_tokens
        self.cache.commit(request, end, row.snapshot)
        if end >= request.num_prompt and not request.prefilled:
            assert request.admitted_at is not None
            request.prefilled = True
            request.times = (request.admitted_at - request.arrived_at, time.monotonic() - request.admitted_at)
        if result.prompt_logprobs is not None:
            request.prompt_logprobs.extend(TokenLogprob(*entry) for entry in result.prompt_logprobs)
        if result.token_id is not None:
            return self._commit_token(request, result.token_id, result)
        return self._finish(request, "length") if request.max_tokens == 0 and end == request.num_known else None

    def _commit_token(self, request: Request, token_id: int, result: RowResult) -> RequestOutput:
        self._generation_tokens += 1
        params = request.params
        if token_id in params.stop_token_ids:
            return self._finish(request, "stop", stop_token_id=token_id)
        if token_id in self.limits.eos_token_ids and not params.ignore_eos:
            return self._finish(request, "stop", num_unlisted=1)
        request.token_ids.append(token_id)
        logprobs = None
        if params.logprobs is not None:
            assert result.logprob is not None
            logprobs = [TokenLogprob(token_id, *result.logprob)]
        if result.complete:
            return self._finish(request, "stop", [token_id], logprobs)
        if request.num_output >= request.max_tokens:
            return self._finish(request, "length", [token_id], logprobs)
        return self._output(request, [token_id], logprobs)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        stop_token_id: int | None = None,
        num_unlisted: int = 0,
        error: str | None = None,
    ) -> RequestOutput:
        """The one end of a request."""
        del self._open[request.request_id]
        self._leave(request)
        request.status = "finished"
        return self._output(
            request,
            token_ids or [],
            logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_output_tokens=request.num_output + num_unlisted + (stop_token_id is not None),
            error=error,
        )

    def _output(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        num_output_tokens: int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """An output, with what is due once per request."""
        prompt_logprobs = None
        if request.wants_prompt_logprobs and len(request.prompt_logprobs) == request.num_prompt:
            prompt_logprobs, request.wants_prompt_logprobs = request.prompt_logprobs, False
        num_cached, request.num_cached = request.num_cached, None
        times, request.times = request.times, None
        return RequestOutput(
            request.request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            num_cached,
            finish_reason,
            stop_token_id,
            request.num_output if num_output_tokens is None else num_output_tokens,
            error,
            None,
            times,
        )

    # -- numbers -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges and running totals."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_pages=self.cache.pool.num_free,
            num_pages=self.cache.pool.num_usable,
            num_steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            snapshots=None if self.cache.snapshots is None else self.cache.snapshots.stats(),
        )


def _are_below(token_ids: Sequence[int], vocab_size: int) -> bool:
    try:
        packed = array("I", token_ids)
    except OverflowError:  # below 0, or far above
        return False
    import numpy as np  # the API process imports this module too, and has no use for numpy

    return int(np.frombuffer(packed, dtype=np.uint32).max()) < vocab_size


def _join(request: Request) -> Join:
    prompt_ids = request.token_ids[: request.num_prompt].tolist() if request.params.reads_prompt else []
    return Join(
        slot=request.slot,
        params=request.params,
        seed=request.seed,
        prompt_ids=prompt_ids,
        output_ids=request.token_ids[request.num_prompt :].tolist(),
        snapshot=request.restored_from,
    )


def rejected(request_id: str, error: RequestError) -> RequestOutput:
    """The end of a request that was refused."""
    return RequestOutput(
        request_id, [], None, None, None, "rejected", None, 0, str(error), error.code, None, error.param
    )
