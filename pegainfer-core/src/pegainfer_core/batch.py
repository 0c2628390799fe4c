"""A step plan as tensors.

Owns the device's page tables, by slot, the shape a step is padded to, and the one place where a `ForwardBatch` is put together: every
input of a step is a view of one packed buffer, filled on the host and copied at once. Knows nothing of models or sampling.

Shape suffixes: T tokens, R rows, N rows whose logits are computed, P pages of the longest row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pegainfer_core.kv.pages import PADDING_PAGE
from pegainfer_core.model import ForwardBatch
from pegainfer_core.ops.attention import Attention, AttentionBackend, AttentionMetadata
from pegainfer_core.ops.states import States
from pegainfer_core.plan import Row, StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step's tensors, padding included. Decode rows (one token each) come first, then the prompt rows' tokens."""

    decode_rows: int
    prompt_rows: int
    prompt_tokens: int
    sampled_rows: int
    """Rows whose logits are computed: those that sample, or, where a shape is shared by many steps, all of them."""
    max_context_len: int
    """No row's context is longer."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.decode_rows + self.prompt_rows

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.decode_rows + self.prompt_tokens


def exact_shape(plan: StepPlan) -> StepShape:
    """The shape of a plan without padding."""
    decode_rows = num_decode_rows(plan)
    return StepShape(
        decode_rows=decode_rows,
        prompt_rows=len(plan.rows) - decode_rows,
        prompt_tokens=plan.num_tokens - decode_rows,
        sampled_rows=sum(row.samples for row in plan.rows),
        max_context_len=max(row.start + row.num_tokens for row in plan.rows),
    )


def num_decode_rows(plan: StepPlan) -> int:
    """The plan's leading rows of a single token."""
    return sum(row.num_tokens == 1 for row in plan.rows)


class StepInputs:
    """Everything a step's forward reads that changes from step to step: views of one int32 buffer."""

    FIELDS = (
        ("token_ids_T", "T", 2),
        ("positions_T", "T", 2),
        ("write_index_T", "T", 2),
        ("sampled_index_N", "N", 2),
        ("sampled_slot_N", "N", 2),
        ("slots_R", "R", 2),
        ("query_start_R1", "R1", 1),
        ("context_lens_R", "R", 1),
        ("fresh_R", "R", 1),
    )
    """(name, size, int32 words a value)."""

    def __init__(self, shape: StepShape, buffer: Tensor) -> None:
        """Views of `buffer`, which holds at least `num_words(shape)` int32 values."""
        self.buffer = buffer[: self.num_words(shape)]
        self._views: dict[str, Tensor] = {}
        start = 0
        for name, words, size in self._layout(shape):
            view = buffer[start : start + words * size]
            self._views[name] = view.view(torch.int64) if words == 2 else view
            start += words * size

    @classmethod
    def num_words(cls, shape: StepShape) -> int:
        """int32 values that a shape's inputs take."""
        return sum(words * size for _, words, size in cls._layout(shape))

    @classmethod
    def _layout(cls, shape: StepShape) -> list[tuple[str, int, int]]:
        sizes = {
            "T": shape.num_tokens,
            "N": shape.sampled_rows,
            "R": shape.num_rows,
            "R1": shape.num_rows + 1,
        }
        return [(name, words, sizes[size]) for name, size, words in cls.FIELDS]

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]


class BatchBuilder:
    """Builds the tensors of each step from the plan and what earlier plans said about the slots."""

    def __init__(self, num_slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._tables = np.full((num_slots + 1, -(-max_model_len // page_size)), PADDING_PAGE, dtype=np.int32)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)
        self.page_tables_SP = torch.from_numpy(self._tables.copy()).to(device)
        """Per slot; the row after the last slot is padding. Entries past a slot's own pages mean nothing."""
        self.padding_slot = num_slots

    def fill(self, plan: StepPlan, shape: StepShape, inputs: StepInputs) -> list[int]:
        """Update the page tables and copy the plan's inputs, padded to `shape`, into `inputs`.

        Returns each row's place among the rows whose logits are computed, -1 for those that have none.
        """
        self._update_tables(plan)
        packed = torch.empty(StepInputs.num_words(shape), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        places = self._pack(plan.rows, shape, StepInputs(shape, packed))
        inputs.buffer.copy_(packed, non_blocking=True)
        return places

    def fill_padding(self, shape: StepShape, inputs: StepInputs) -> None:
        """A step of padding alone: harmless to run, whatever else is on the device."""
        packed = torch.empty(StepInputs.num_words(shape), dtype=torch.int32)
        self._pack([], shape, StepInputs(shape, packed))
        inputs.buffer.copy_(packed)

    def batch(
        self,
        shape: StepShape,
        inputs: StepInputs,
        last_token_S: Tensor,
        backend: AttentionBackend,
        caches: list[tuple[Tensor, Tensor]],
        states: list[tuple[Tensor, ...]],
        lens: tuple[list[int], list[int]] | None = None,
    ) -> ForwardBatch:
        """The batch over `inputs`. `lens` are (query, context) lengths of exact shapes; padded ones are bounds only.

        A negative token id -1 - slot stands for `last_token_S[slot]`, which only the device knows.
        """
        query_lens = [1] * shape.decode_rows + [shape.prompt_tokens] * shape.prompt_rows
        context_lens = [shape.max_context_len] * shape.num_rows
        if lens is not None:
            query_lens, context_lens = lens
        pages = -(-shape.max_context_len // self._page_size)
        metadata = AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start_R1=inputs["query_start_R1"],
            context_lens_R=inputs["context_lens_R"],
            page_table_RP=self.page_tables_SP[:, :pages].index_select(0, inputs["slots_R"]),
            write_index_T=inputs["write_index_T"],
            max_query_len=max(query_lens),
            max_context_len=shape.max_context_len,
            num_decode_rows=shape.decode_rows,
        )
        backend.plan(metadata)
        given_T = inputs["token_ids_T"]
        token_ids_T = torch.where(given_T < 0, last_token_S[(-1 - given_T).clamp(min=0)], given_T)
        return ForwardBatch(
            token_ids_T=token_ids_T,
            positions_T=inputs["positions_T"],
            attention=Attention(backend=backend, caches=caches, metadata=metadata),
            states=States(
                layers=states,
                slots_R=inputs["slots_R"],
                fresh_R=inputs["fresh_R"],
                query_start_R1=inputs["query_start_R1"],
                query_lens=query_lens,
                num_decode_rows=shape.decode_rows,
            ),
        )

    def _update_tables(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._num_pages[join.slot] = 0
        width = self._tables.shape[1]
        places: list[int] = []
        pages: list[int] = []
        for row in plan.rows:
            if row.new_pages:
                first = int(self._num_pages[row.slot])
                last = first + len(row.new_pages)
                self._tables[row.slot, first:last] = row.new_pages
                self._num_pages[row.slot] = last
                places.extend(range(row.slot * width + first, row.slot * width + last))
                pages.extend(row.new_pages)
        if places:
            both = to_device(np.asarray([places, pages], dtype=np.int64), self._device)
            self.page_tables_SP.view(-1).index_copy_(0, both[0], both[1].int())

    def _pack(self, rows: Sequence[Row], shape: StepShape, host: StepInputs) -> list[int]:
        """Fill the host's copy of the inputs; what no row uses is padding."""
        first_prompt = sum(row.num_tokens == 1 for row in rows)
        values = {name: host[name].numpy() for name, _, _ in StepInputs.FIELDS}
        for name, padding in (
            ("token_ids_T", 0),
            ("positions_T", 0),
            ("write_index_T", PADDING_PAGE * self._page_size),
            ("sampled_index_N", 0),
            ("sampled_slot_N", self.padding_slot),
            ("slots_R", self.padding_slot),
            ("fresh_R", 1),
        ):
            values[name][:] = padding
        query_lens = np.zeros(shape.num_rows, dtype=np.int32)
        query_lens[: shape.decode_rows] = 1
        context_lens = values["context_lens_R"]
        context_lens[: shape.decode_rows] = 1
        context_lens[shape.decode_rows :] = 0
        self._pack_rows(rows[:first_prompt], 0, 0, values, query_lens)
        self._pack_rows(rows[first_prompt:], shape.decode_rows, shape.decode_rows, values, query_lens)
        values["query_start_R1"][0] = 0
        np.cumsum(query_lens, out=values["query_start_R1"][1:])
        return self._pack_sampled(rows, first_prompt, shape, values)

    def _pack_rows(
        self,
        rows: Sequence[Row],
        first_row: int,
        first_token: int,
        values: dict[str, np.ndarray],
        query_lens: np.ndarray,
    ) -> None:
        """Rows of one kind, side by side from `first_row` and `first_token` on."""
        if not rows:
            return
        slots = np.array([row.slot for row in rows])
        starts = np.array([row.start for row in rows])
        lens = np.array([row.num_tokens for row in rows])
        row_slice = slice(first_row, first_row + len(rows))
        query_lens[row_slice] = lens
        values["context_lens_R"][row_slice] = starts + lens
        values["slots_R"][row_slice] = slots
        values["fresh_R"][row_slice] = starts == 0
        num_tokens = int(lens.sum())
        token_slice = slice(first_token, first_token + num_tokens)
        slot_T = np.repeat(slots, lens)
        offsets = np.cumsum(lens) - lens
        position_T = np.arange(num_tokens) - np.repeat(offsets, lens) + np.repeat(starts, lens)
        values["positions_T"][token_slice] = position_T
        page_T = self._tables[slot_T, position_T // self._page_size].astype(np.int64)
        values["write_index_T"][token_slice] = page_T * self._page_size + position_T % self._page_size
        token_ids: list[int] = []
        for row in rows:
            token_ids.extend(row.token_ids)
            if len(row.token_ids) < row.num_tokens:
                token_ids.append(-1 - row.slot)
        values["token_ids_T"][token_slice] = token_ids

    def _pack_sampled(
        self, rows: Sequence[Row], first_prompt: int, shape: StepShape, values: dict[str, np.ndarray]
    ) -> list[int]:
        """Where each row's last token is, and whose `last_token` its sample becomes."""
        every_row = shape.sampled_rows == shape.num_rows
        ends = values["query_start_R1"][1:]
        places: list[int] = []
        count = 0
        for index, row in enumerate(rows):
            padded = index if index < first_prompt else index - first_prompt + shape.decode_rows
            place = padded if every_row else count
            places.append(place if row.samples else -1)
            if row.samples:
                values["sampled_index_N"][place] = ends[padded] - 1
                values["sampled_slot_N"][place] = row.slot
                count += 1
        return places


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of a fresh array; to a GPU through pinned memory, so that the copy does not wait for the stream."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
