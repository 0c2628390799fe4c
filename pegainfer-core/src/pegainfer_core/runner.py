"""Runs step plans on one device: batch, forward, sample, results.

Owns the device's slots (last token, sampling state) and the order of work on the stream. Knows nothing of scheduling
or text. `launch` never waits for the device; `RunningStep.wait` does, once per step.

Shape suffixes: T tokens, N rows whose logits are computed, E hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pegainfer_core.batch import BatchBuilder, StepInputs, StepShape, exact_shape, to_device
from pegainfer_core.engine import DeviceLostError
from pegainfer_core.graphs import Recorder, StepGraphs
from pegainfer_core.kv.storage import StateStorage
from pegainfer_core.model import Model
from pegainfer_core.ops.attention import AttentionBackend
from pegainfer_core.ops.dispatch import fast_ops
from pegainfer_core.plan import Row, RowResult, StepPlan, StepResult
from pegainfer_core.sampler import Logprobs, Sampled, Sampler, SlotState

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits exist at once: bounds the memory of echo requests."""

TopEntry = tuple[float, int, list[tuple[int, float]]]
PromptEntry = tuple[int, float, int, list[tuple[int, float]]]


class Runner:
    """The default `StepRunner`."""

    def __init__(
        self,
        model: Model,
        caches: list[tuple[Tensor, Tensor]],
        states: StateStorage,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        num_slots: int,
        max_model_len: int,
        max_prefill_tokens: int,
        page_size: int,
        device: torch.device,
        recorder: Recorder | None = None,
        fused_ops: bool = True,
    ) -> None:
        self._model = model
        self._caches = caches
        self._states = states
        self._backend = backend
        self._sampler = sampler
        self._device = device
        self._fused_ops = fused_ops
        self._builder = BatchBuilder(num_slots, max_model_len, page_size, device)
        self._last_token_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._sampling: dict[int, SlotState] = {}
        self._prompts: dict[int, list[int]] = {}
        self._graphs: StepGraphs | None = None
        if recorder is not None:
            self._graphs = StepGraphs(
                self._capturable,
                self._builder,
                recorder,
                max_rows=num_slots,
                max_prompt_tokens=max_prefill_tokens,
                max_context_len=max_model_len,
            )

    def prepare(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture the graphs that the first requests need."""
        if self._graphs is not None:
            with self._computing():
                self._graphs.capture_first(on_progress)

    def prepare_more(self) -> bool:
        """Use an idle moment to capture one more graph; False if there is nothing left to prepare."""
        if self._graphs is None:
            return False
        with self._computing():
            return self._graphs.capture_next()

    def launch(self, plan: StepPlan) -> RunningStep:
        """Queue the step behind those launched before."""
        with self._computing():
            for join in plan.joins:
                self._sampling[join.slot] = self._sampler.join(join)
                self._prompts[join.slot] = join.prompt_ids
                if join.snapshot is not None:
                    self._states.restore(join.snapshot, join.slot)
            shape = None if self._graphs is None else self._graphs.shape(plan)
            step = self._run_eager(plan) if shape is None else self._replay(plan, shape)
            for row in plan.rows:  # after the copies of the step's results, which do not wait for these
                if row.snapshot is not None:
                    self._states.save(row.slot, row.snapshot)
            return step

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with _device_loss(), torch.inference_mode(), fast_ops(self._fused_ops):
            yield

    def _replay(self, plan: StepPlan, shape: StepShape) -> RunningStep:
        assert self._graphs is not None
        captured = self._graphs.step(shape)
        places = self._builder.fill(plan, shape, captured.inputs)
        captured.replay()
        return self._sampled(
            plan, places, captured.logits_NV, (captured.token_ids_N, captured.finite_N), prompt_logprobs={}
        )

    def _run_eager(self, plan: StepPlan) -> RunningStep:
        shape = exact_shape(plan)
        buffer = torch.empty(StepInputs.num_words(shape), dtype=torch.int32, device=self._device)
        inputs = StepInputs(shape, buffer)
        places = self._builder.fill(plan, shape, inputs)
        lens = [row.num_tokens for row in plan.rows], [row.start + row.num_tokens for row in plan.rows]
        hidden_TE = self._hidden(shape, inputs, lens)
        prompt_logprobs = self._prompt_logprobs(plan.rows, hidden_TE)
        if not shape.sampled_rows:
            return RunningStep(plan, places, [], None, prompt_logprobs, self._sampler.prepare, at_once=True)
        logits_NV, token_ids_N, finite_N = self._choose(hidden_TE, inputs)
        return self._sampled(plan, places, logits_NV, (token_ids_N, finite_N), prompt_logprobs)

    def _capturable(self, shape: StepShape, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The whole step: what a graph captures."""
        return self._choose(self._hidden(shape, inputs, None), inputs)

    def _hidden(self, shape: StepShape, inputs: StepInputs, lens: tuple[list[int], list[int]] | None) -> Tensor:
        batch = self._builder.batch(
            shape, inputs, self._last_token_S, self._backend, self._caches, self._states.layers, lens
        )
        hidden_TE: Tensor = self._model(batch)
        return hidden_TE

    def _choose(self, hidden_TE: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, arg max and finiteness of the rows that want them; the arg max becomes their slots' last token."""
        logits_NV = self._model.logits(hidden_TE.index_select(0, inputs["sampled_index_N"]))
        token_ids_N, finite_N = self._sampler.greedy(logits_NV)
        self._last_token_S.index_copy_(0, inputs["sampled_slot_N"], token_ids_N)
        return logits_NV, token_ids_N, finite_N

    def _sampled(
        self,
        plan: StepPlan,
        places: list[int],
        logits_NV: Tensor,
        greedy: tuple[Tensor, Tensor],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> RunningStep:
        """Redo the rows that want more than the arg max, unless that needs tokens which are still to come."""
        rows = [row for row, place in zip(plan.rows, places, strict=True) if place >= 0]
        states = [self._sampling[row.slot] for row in rows]

        def sample() -> Sampled:
            with self._computing():
                return self._sample(rows, [place for place in places if place >= 0], states, logits_NV, greedy)

        waits = any(state.waits(row.output_index) for row, state in zip(rows, states, strict=True))
        return RunningStep(plan, places, states, sample, prompt_logprobs, self._sampler.prepare, at_once=not waits)

    def _sample(
        self,
        rows: list[Row],
        places: list[int],
        states: list[SlotState],
        logits_NV: Tensor,
        greedy: tuple[Tensor, Tensor],
    ) -> Sampled:
        """Ids and logprobs of the rows that sample; what is not the arg max becomes its slot's last token."""
        sampled = self._sampler.sample(logits_NV, states, [row.output_index for row in rows], places, greedy)
        if sampled.changed:
            slots = {place: row.slot for place, row in zip(places, rows, strict=True)}
            pairs = np.asarray([sampled.changed, [slots[place] for place in sampled.changed]], dtype=np.int64)
            both = to_device(pairs, self._device)
            self._last_token_S[both[1]] = sampled.token_ids_N[both[0]]
        return sampled

    def _prompt_logprobs(self, rows: Sequence[Row], hidden_TE: Tensor) -> dict[int, PromptLogprobs]:
        """Logprobs of the prompt tokens that follow each position of the rows that want them, by row index."""
        wanted: dict[int, PromptLogprobs] = {}
        first = 0
        for index, row in enumerate(rows):
            if row.prompt_logprobs:
                wanted[index] = self._score(row, hidden_TE[first : first + row.num_tokens])
            first += row.num_tokens
        return wanted

    def _score(self, row: Row, hidden_TE: Tensor) -> PromptLogprobs:
        targets = self._prompts[row.slot][row.start + 1 : row.start + row.num_tokens + 1]
        count = self._sampling[row.slot].params.prompt_logprobs
        assert count is not None
        pieces: list[Logprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            ids = targets[start : start + PROMPT_LOGPROB_ROWS]
            logits_TV = self._model.logits(hidden_TE[start : start + len(ids)])
            pieces.append(self._sampler.logprobs(logits_TV, to_device(np.asarray(ids), self._device), count))
        return PromptLogprobs(targets, count, pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of one row's prompt tokens, in pieces, still on the device."""

    token_ids: list[int]
    count: int
    pieces: list[Logprobs]

    def entries(self) -> list[PromptEntry]:
        """On the host."""
        tops = [top for piece in self.pieces for top in _top_entries(piece)]
        return [
            (token_id, logprob, rank, top[: self.count])
            for token_id, (logprob, rank, top) in zip(self.token_ids, tops, strict=True)
        ]


class RunningStep:
    """A launched step; its copies to the host are queued behind it."""

    def __init__(
        self,
        plan: StepPlan,
        places: list[int],
        states: list[SlotState],
        sample: Callable[[], Sampled] | None,
        prompt_logprobs: dict[int, PromptLogprobs],
        took: Callable[[Sequence[SlotState]], None],
        *,
        at_once: bool,
    ) -> None:
        """`sample` queues the choice of tokens; `took` is told of the states that took one."""
        self._plan = plan
        self._places = places
        self._states = states
        """Of the rows that sample, in plan order."""
        self._sample = sample
        self._took = took
        self._prompt_logprobs = prompt_logprobs
        self._logprobs: Logprobs | None = None
        self._ready: torch.cuda.Event | None = None
        self._host: Tensor | None = None
        if at_once:
            self.settle()

    def settle(self) -> None:
        """Queue the choice of tokens, if it had to wait for those of the step before: they are known now."""
        sample, self._sample = self._sample, None
        if sample is None:
            return
        sampled = sample()
        self._logprobs = sampled.logprobs
        on_gpu = sampled.token_ids_N.is_cuda
        self._host = torch.empty(2, len(sampled.token_ids_N), dtype=torch.int64, pin_memory=on_gpu)
        self._host[0].copy_(sampled.token_ids_N, non_blocking=True)
        self._host[1].copy_(sampled.finite_N, non_blocking=True)
        if on_gpu:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def wait(self) -> StepResult:
        """Block until the step is done; its tokens are taken, for those that depend on them."""
        assert self._sample is None, "settled before"
        with _device_loss():
            if self._ready is not None:
                self._ready.synchronize()
            results = self._results()
            self._took(self._states)
            return StepResult(rows=results)

    def _results(self) -> list[RowResult]:
        token_ids, finite = ([], []) if self._host is None else self._host.tolist()
        entries = iter([] if self._logprobs is None else _top_entries(self._logprobs))
        states = iter(self._states)
        results: list[RowResult] = []
        for index, (row, place) in enumerate(zip(self._plan.rows, self._places, strict=True)):
            wanted = self._prompt_logprobs.get(index)
            prompt_logprobs = None if wanted is None else wanted.entries()
            if place < 0:
                results.append(RowResult(token_id=None, prompt_logprobs=prompt_logprobs))
                continue
            state = next(states)
            top = next(entries) if state.params.logprobs is not None else None
            results.append(_result(state, row, token_ids[place], bool(finite[place]), top, prompt_logprobs))
        return results


def _result(
    state: SlotState,
    row: Row,
    token_id: int,
    finite: bool,
    top: TopEntry | None,
    prompt_logprobs: list[PromptEntry] | None,
) -> RowResult:
    """What a row that samples gave. The state takes its token."""
    if state.num_output != row.output_index or state.ended:
        return RowResult(token_id=None)  # void: the request has ended, or a step before failed
    problem = state.problem if finite else "the model's logits are not finite for this request"
    if problem is not None:
        return RowResult(token_id=None, error=problem)
    logprob = None if top is None else (top[0], top[1], top[2][: state.params.logprobs])
    state.record(token_id)
    return RowResult(token_id=token_id, logprob=logprob, prompt_logprobs=prompt_logprobs, complete=state.complete)


@contextlib.contextmanager
def _device_loss() -> Iterator[None]:
    """Tell errors after which the device computes nothing any more from those of one step."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(str(error)) from error
    except RuntimeError as error:
        if "Triton Error [CUDA]" in str(error):  # Triton's launcher has no type of its own for it
            raise DeviceLostError(str(error)) from error
        raise


def _top_entries(logprobs: Logprobs) -> list[TopEntry]:
    """(logprob, rank, [(id, logprob), ...]) per row, on the host."""
    values = logprobs.logprob_R.tolist()
    ranks = logprobs.rank_R.tolist()
    top_ids = logprobs.top_ids_RN.tolist()
    top_values = logprobs.top_logprobs_RN.tolist()
    return [
        (value, rank, list(zip(ids, tops, strict=True)))
        for value, rank, ids, tops in zip(values, ranks, top_ids, top_values, strict=True)
    ]
