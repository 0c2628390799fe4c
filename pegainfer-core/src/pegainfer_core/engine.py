"""The step loop's body: plan, run, commit, emit.

Owns one scheduler and one runner, and the order of the four acts. Knows nothing of processes, text or tensors. A step that raises fails
the requests it touched; the engine goes on unless the device itself is lost (`DeviceLostError`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pegainfer_core.errors import RequestError
from pegainfer_core.grammar_admission import GrammarAdmission
from pegainfer_core.messages import AddRequest, EngineStats, RequestOutput, StepOutputs
from pegainfer_core.plan import StepPlan, StepResult
from pegainfer_core.scheduler import Scheduler, rejected

log = logging.getLogger(__name__)

GRAMMAR_WAIT_SECONDS = 0.01
"""Longest sleep of an engine that has nothing but grammars to wait for: new messages are looked at in between."""


class DeviceLostError(Exception):
    """The device cannot compute any more; the engine must end."""


class LaunchedStep(Protocol):
    """A step that may still be running on the device."""

    def settle(self) -> None:
        """Choose its tokens, where that needs those of the steps before, which have been waited for by now."""
        ...

    def wait(self) -> StepResult:
        """Block until its results are on the host."""
        ...


class StepRunner(Protocol):
    """Turns plans into results. The runner of a torch model is `runner.Runner`."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start computing a plan, after every plan launched before it."""
        ...

    def prepare_more(self) -> bool:
        """Use an idle moment to make later steps faster; False if there is nothing left to do."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What observers of `pegainfer_step_finished` get."""

    index: int
    num_rows: int
    num_decode_rows: int
    num_tokens: int
    plan_seconds: float
    run_seconds: float
    """Launching this step and waiting for the one that is committed."""
    commit_seconds: float
    stats: EngineStats


class Engine:
    """Requests in, step outputs out. Single-threaded: whoever calls `step` calls everything else too."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        run_ahead: bool = False,
        grammars: GrammarAdmission | None = None,
        observers: Sequence[Callable[[StepReport], None]] = (),
    ) -> None:
        """Without `grammars`, requests that ask for one are refused."""
        self.scheduler = scheduler
        self.runner = runner
        self.run_ahead = run_ahead
        self._grammars = grammars
        self._observers = list(observers)
        self._launched: list[tuple[StepPlan, LaunchedStep]] = []
        """Steps not committed yet, oldest first: at most one between calls of `step`."""
        self._outputs: list[RequestOutput] = []
        """Ends that need no step (rejections, aborts), and this step's outputs."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_requests or bool(self._launched) or bool(self._outputs) or bool(self._grammars)

    def add(self, message: AddRequest) -> None:
        """Take a request; a refusal comes out of the next `step`. One with a grammar reaches the scheduler when that is compiled."""
        if message.params.grammar is None:
            self._schedule(message)
            return
        try:
            if self._grammars is None:
                raise RequestError("this engine takes no grammars", param=message.params.grammar.field)
            self._grammars.add(message)
        except RequestError as error:
            self._outputs.append(rejected(message.request_id, error))

    def abort(self, request_ids: list[str]) -> None:
        """End requests; their ends come out of the next `step`."""
        self._outputs.extend(self.scheduler.abort(request_ids))
        if self._grammars is not None:
            self._outputs.extend(self._grammars.abort(request_ids))

    def _schedule(self, message: AddRequest) -> None:
        rejection = self.scheduler.add(message)
        if rejection is not None:
            self._outputs.append(rejection)

    def step(self) -> StepOutputs:
        """Advance by one step. With run-ahead, the outputs are those of the step before."""
        self._take_compiled()
        started = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        finished = self._run(plan)
        ran = time.perf_counter()
        self._commit(finished)
        acts = (planned - started, ran - planned, time.perf_counter() - ran)
        if plan is not None and self._observers:
            self._observe(plan, *acts)
        return self._emit(plan, acts if plan is not None or finished else None)

    def _take_compiled(self) -> None:
        """Schedule requests whose grammar is compiled; while there is nothing else to do, sleep until one is, or for a moment."""
        if not self._grammars:
            return
        if not (self.scheduler.has_requests or self._launched or self._outputs):
            self._grammars.wait(GRAMMAR_WAIT_SECONDS)
        for message, error in self._grammars.take():
            if error is None:
                self._schedule(message)
            else:
                self._outputs.append(rejected(message.request_id, error))

    def _run(self, plan: StepPlan | None) -> list[StepResult]:
        """Launch the plan and wait for the steps that are due: all of them, or with run-ahead all but the newest."""
        self._settle()
        if plan is not None:
            try:
                self._launched.append((plan, self.runner.launch(plan)))
            except Exception as error:
                self._fail(plan, error)
        keep = 1 if self.run_ahead and plan is not None else 0
        finished: list[StepResult] = []
        while len(self._launched) > keep:
            due, launched = self._launched.pop(0)
            try:
                finished.append(launched.wait())
            except Exception as error:
                self._fail(due, error)
        return finished

    def _settle(self) -> None:
        """Let the newest step choose the tokens that had to wait for the step before, which is waited for by now."""
        if self._launched:
            plan, launched = self._launched[-1]
            try:
                launched.settle()
            except Exception as error:
                self._launched.pop()
                self._fail(plan, error)

    def _commit(self, finished: list[StepResult]) -> None:
        for result in finished:
            self._outputs.extend(self.scheduler.commit(result))

    def _emit(self, plan: StepPlan | None, acts: tuple[float, float, float] | None) -> StepOutputs:
        outputs, self._outputs = self._outputs, []
        if self._grammars is not None:
            self._grammars.release([output.request_id for output in outputs if output.finish_reason is not None])
        return StepOutputs(outputs, self.scheduler.stats(), 0 if plan is None else plan.num_tokens, acts)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        if isinstance(error, DeviceLostError):
            raise error
        log.exception("step %d failed; its %d requests end with an error", plan.index, len(plan.rows), exc_info=error)
        self._outputs.extend(self.scheduler.fail(plan, f"the engine failed computing this request: {error}"))

    def _observe(self, plan: StepPlan, plan_seconds: float, run_seconds: float, commit_seconds: float) -> None:
        report = StepReport(
            index=plan.index,
            num_rows=len(plan.rows),
            num_decode_rows=sum(row.num_tokens == 1 for row in plan.rows),
            num_tokens=plan.num_tokens,
            plan_seconds=plan_seconds,
            run_seconds=run_seconds,
            commit_seconds=commit_seconds,
            stats=self.scheduler.stats(),
        )
        for observe in list(self._observers):
            try:
                observe(report)
            except Exception:
                log.exception("observer %r failed and is not called again", observe)
                self._observers.remove(observe)
