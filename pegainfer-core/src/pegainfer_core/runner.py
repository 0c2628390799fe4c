"""Runs step plans on one device: batch, forward, sample, results.

Owns the device's slots (last token, sampling state) and the order of work on the stream. Knows nothing of scheduling
or text. `launch` never waits for the device; `RunningStep.wait` does, once per step.

Shape suffixes: T tokens, R sampling rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pegainfer_core.batch import BatchBuilder, to_device
from pegainfer_core.engine import DeviceLostError
from pegainfer_core.model import Model
from pegainfer_core.ops.attention import AttentionBackend
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
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._backend = backend
        self._sampler = sampler
        self._device = device
        self._builder = BatchBuilder(num_slots, max_model_len, page_size, device)
        self._last_token_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._states: dict[int, SlotState] = {}
        self._prompts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Queue the step behind those launched before."""
        with _device_loss():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> RunningStep:
        for join in plan.joins:
            self._states[join.slot] = self._sampler.join(join)
            self._prompts[join.slot] = join.prompt_ids
        batch = self._builder.build(plan, self._last_token_S, self._backend, self._caches)
        hidden_TE = self._model(batch)
        ends = np.cumsum([row.num_tokens for row in plan.rows])
        prompt_logprobs = self._prompt_logprobs(plan.rows, ends, hidden_TE)
        sampling = [index for index, row in enumerate(plan.rows) if row.samples]
        states = [self._states[plan.rows[index].slot] for index in sampling]
        sampled = None
        if sampling:
            hidden_RE = hidden_TE[to_device(ends[sampling] - 1, self._device)]
            sampled = self._sampler.sample(
                self._model.logits(hidden_RE), states, [plan.rows[index].output_index for index in sampling]
            )
            slots = to_device(np.asarray([plan.rows[index].slot for index in sampling]), self._device)
            self._last_token_S[slots] = sampled.token_ids_R
        return RunningStep(plan, sampling, states, sampled, prompt_logprobs)

    def _prompt_logprobs(self, rows: Sequence[Row], ends: np.ndarray, hidden_TE: Tensor) -> dict[int, PromptLogprobs]:
        """Logprobs of the prompt tokens that follow each position of the rows that want them, by row index."""
        wanted: dict[int, PromptLogprobs] = {}
        for index, row in enumerate(rows):
            if not row.prompt_logprobs:
                continue
            targets = self._prompts[row.slot][row.start + 1 : row.start + row.num_tokens + 1]
            first = int(ends[index]) - row.num_tokens
            count = self._states[row.slot].params.prompt_logprobs
            assert count is not None
            pieces: list[Logprobs] = []
            for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
                ids = targets[start : start + PROMPT_LOGPROB_ROWS]
                logits_RV = self._model.logits(hidden_TE[first + start : first + start + len(ids)])
                pieces.append(self._sampler.logprobs(logits_RV, to_device(np.asarray(ids), self._device), count))
            wanted[index] = PromptLogprobs(targets, count, pieces)
        return wanted


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
        sampling: list[int],
        states: list[SlotState],
        sampled: Sampled | None,
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        self._plan = plan
        self._sampling = sampling
        self._states = states
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._ready: torch.cuda.Event | None = None
        self._host: Tensor | None = None
        if sampled is not None:
            packed = torch.stack([sampled.token_ids_R, sampled.finite_R.long()])
            if packed.is_cuda:
                self._host = torch.empty_like(packed, device="cpu", pin_memory=True)
                self._host.copy_(packed, non_blocking=True)
                self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._ready.record()
            else:
                self._host = packed

    def wait(self) -> StepResult:
        """Block until the step is done; counts its tokens for the penalties of the next ones."""
        with _device_loss():
            return self._wait()

    def _wait(self) -> StepResult:
        if self._ready is not None:
            self._ready.synchronize()
        results = [
            RowResult(token_id=None, prompt_logprobs=self._entries(index)) for index in range(len(self._plan.rows))
        ]
        if self._host is None or self._sampled is None:
            return StepResult(rows=results)
        token_ids, finite = self._host.tolist()
        logprobs = None if self._sampled.logprobs is None else _top_entries(self._sampled.logprobs)
        for position, (index, state) in enumerate(zip(self._sampling, self._states, strict=True)):
            if not finite[position]:
                results[index] = RowResult(token_id=None, error="the model's logits are not finite for this request")
                continue
            token_id = int(token_ids[position])
            state.record(token_id)
            logprob = None
            if logprobs is not None and state.params.logprobs is not None:
                value, rank, top = logprobs[position]
                logprob = (value, rank, top[: state.params.logprobs])
            results[index] = RowResult(
                token_id=token_id, logprob=logprob, prompt_logprobs=results[index].prompt_logprobs
            )
        return StepResult(rows=results)

    def _entries(self, index: int) -> list[PromptEntry] | None:
        wanted = self._prompt_logprobs.get(index)
        return None if wanted is None else wanted.entries()


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
