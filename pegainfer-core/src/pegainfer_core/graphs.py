"""Captured steps: one CUDA graph per shape, from the packed inputs to the chosen ids.

Owns which shapes exist, what was captured, and the memory that captures share. Knows nothing of requests. Invariant: whatever varies from
step to step is device data that a replay reads; a shape not captured yet is captured when it is first needed, or while the engine idles.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from pegainfer_core.batch import BatchBuilder, StepInputs, StepShape, num_decode_rows
from pegainfer_core.plan import StepPlan
from pegainfer_core.step_sizes import DECODE_ROWS, MIXED_DECODE_ROWS, MIXED_TOKENS, at_least, sizes_up_to

log = logging.getLogger(__name__)

PROMPT_ROWS = 32
SHORT_CONTEXT = 8192
"""Steps whose contexts are all shorter do not split them for balance."""
FIRST_DECODE_ROWS = 8
"""Decode shapes up to here are captured before the engine is ready."""

Forward = Callable[[StepShape, StepInputs], tuple[Tensor, Tensor, Tensor]]
"""(logits [N, V], ids [N], finite [N]) of a step."""


Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work that only touches device data at fixed places, and returns what does the same work again."""


def cuda_recorder() -> Recorder:
    """Records CUDA graphs that share one memory pool: replays never overlap, so neither do the lives of their tensors."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # only this thread captures; others may use the device meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    return record


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded step, and the views that it reads and writes."""

    replay: Callable[[], None]
    inputs: StepInputs
    logits_NV: Tensor
    token_ids_N: Tensor
    finite_N: Tensor


class StepGraphs:
    """The captured steps of one runner."""

    def __init__(
        self,
        forward: Forward,
        builder: BatchBuilder,
        record: Recorder,
        *,
        max_rows: int,
        max_prompt_tokens: int,
        max_context_len: int,
    ) -> None:
        self._record = record
        self._forward = forward
        self._builder = builder
        self._max_context_len = max_context_len
        self._decode_rows = sizes_up_to(DECODE_ROWS, max_rows)
        self._mixed_decode_rows = sizes_up_to(MIXED_DECODE_ROWS, max_rows)
        self._max_prompt_tokens = max_prompt_tokens
        largest = self._shape(self._mixed_decode_rows[-1], max_prompt_tokens, max_context_len)
        device = builder.page_tables_SP.device
        self._buffer = torch.zeros(StepInputs.num_words(largest), dtype=torch.int32, device=device)
        self._ids_2N = torch.zeros(2, largest.sampled_rows, dtype=torch.int64, device=device)
        self._logits_NV: Tensor | None = None
        self._largest = largest
        self._captured: dict[StepShape, CapturedStep] = {}
        self._pending = self._usual_shapes()
        self._full = False
        """Whether memory ran out: no more captures."""

    @property
    def num_captured(self) -> int:
        """Graphs that exist."""
        return len(self._captured)

    def capture_first(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture what the first requests need."""
        first = [shape for shape in self._pending if not shape.prompt_rows and shape.decode_rows <= FIRST_DECODE_ROWS]
        for done, shape in enumerate(first):
            on_progress(done, len(first))
            self.step(shape)
        on_progress(len(first), len(first))

    def capture_next(self) -> bool:
        """Capture one more of the usual shapes; False if none is left."""
        while self._pending:
            shape = self._pending.pop(0)
            if shape not in self._captured:
                try:
                    self.step(shape)
                except torch.OutOfMemoryError:
                    log.warning("no memory for more than %d graphs; other steps run eagerly", self.num_captured)
                    self._full, self._pending = True, []
                return True
        return False

    def shape(self, plan: StepPlan) -> StepShape | None:
        """The smallest shape that holds a plan, or None if it has to run eagerly."""
        decode_rows = num_decode_rows(plan)
        prompt_rows = len(plan.rows) - decode_rows
        prompt_tokens = plan.num_tokens - decode_rows
        if prompt_rows > PROMPT_ROWS or any(row.prompt_logprobs for row in plan.rows):
            return None
        context = max(row.start + row.num_tokens for row in plan.rows)
        padded_rows = at_least(self._mixed_decode_rows if prompt_rows else self._decode_rows, decode_rows)
        padded_tokens = at_least(self._prompt_tokens(padded_rows), prompt_tokens) if prompt_rows else 0
        shape = self._shape(padded_rows, padded_tokens, context)
        return None if self._full and shape not in self._captured else shape

    def step(self, shape: StepShape) -> CapturedStep:
        """The captured step of a shape, capturing it first if need be."""
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._capture(shape)
        return captured

    def _prompt_tokens(self, decode_rows: int) -> list[int]:
        """Prompt tokens that a step beside `decode_rows` is padded to."""
        return sizes_up_to(
            tuple(total - decode_rows for total in MIXED_TOKENS if total > decode_rows), self._max_prompt_tokens
        )

    def _shape(self, decode_rows: int, prompt_tokens: int, context: int) -> StepShape:
        prompt_rows = PROMPT_ROWS if prompt_tokens else 0
        short = min(SHORT_CONTEXT, self._max_context_len)
        return StepShape(
            decode_rows=decode_rows,
            prompt_rows=prompt_rows,
            prompt_tokens=prompt_tokens,
            sampled_rows=decode_rows + prompt_rows,
            max_context_len=short if context <= short else self._max_context_len,
        )

    def _usual_shapes(self) -> list[StepShape]:
        """In the order in which a filling server meets them; long contexts are left to their first use."""
        decode = [self._shape(rows, 0, 1) for rows in self._decode_rows]
        mixed = [
            self._shape(rows, tokens, 1) for rows in self._mixed_decode_rows for tokens in self._prompt_tokens(rows)
        ]
        few = [shape for shape in decode if shape.decode_rows <= FIRST_DECODE_ROWS]
        return few + mixed + decode[len(few) :]

    def _capture(self, shape: StepShape) -> CapturedStep:
        inputs = StepInputs(shape, self._buffer)
        self._builder.fill_padding(shape, inputs)
        logits_NV, _, _ = self._forward(
            shape, inputs
        )  # compiles kernels and makes lazy allocations outside the capture
        if self._logits_NV is None:
            rows = self._largest.sampled_rows
            self._logits_NV = torch.empty(rows, logits_NV.shape[1], dtype=logits_NV.dtype, device=logits_NV.device)
        # Outputs of all graphs share one place, so that a graph keeps nothing of the pool.
        logits_out_NV = self._logits_NV[: shape.sampled_rows]
        ids_out_2N = self._ids_2N[:, : shape.sampled_rows]

        def work() -> None:
            logits_NV, token_ids_N, finite_N = self._forward(shape, inputs)
            logits_out_NV.copy_(logits_NV)
            ids_out_2N[0].copy_(token_ids_N)
            ids_out_2N[1].copy_(finite_N)

        replay = self._record(work)
        log.debug("captured %s", shape)
        return CapturedStep(replay, inputs, logits_out_NV, ids_out_2N[0], ids_out_2N[1])
