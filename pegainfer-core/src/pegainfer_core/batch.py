"""A step plan as tensors.

Owns the host's mirror of the page tables, by slot, and the one place where a `ForwardBatch` is put together. Knows nothing of models or
sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegainfer_core.model import ForwardBatch
from pegainfer_core.ops.attention import Attention, AttentionBackend, AttentionMetadata
from pegainfer_core.plan import Row, StepPlan


class BatchBuilder:
    """Builds the tensors of each step from the plan and what earlier plans said about the slots."""

    def __init__(self, num_slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._tables = np.zeros((num_slots, -(-max_model_len // page_size)), dtype=np.int32)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)

    def build(
        self,
        plan: StepPlan,
        last_token_S: Tensor,
        backend: AttentionBackend,
        caches: list[tuple[Tensor, Tensor]],
    ) -> ForwardBatch:
        """The batch of a plan. Inputs the host does not know are taken from `last_token_S` [slots] on the device."""
        for join in plan.joins:
            self._num_pages[join.slot] = 0
        for row in plan.rows:
            self._grow(row)
        metadata, positions = self._metadata(plan.rows)
        backend.plan(metadata)
        return ForwardBatch(
            token_ids_T=self._token_ids(plan.rows, last_token_S),
            positions_T=self._to_device(positions),
            attention=Attention(backend=backend, caches=caches, metadata=metadata),
        )

    def _grow(self, row: Row) -> None:
        first = int(self._num_pages[row.slot])
        last = first + len(row.new_pages)
        self._tables[row.slot, first:last] = row.new_pages
        self._num_pages[row.slot] = last

    def _metadata(self, rows: list[Row]) -> tuple[AttentionMetadata, np.ndarray]:
        query_lens = [row.num_tokens for row in rows]
        context_lens = [row.start + row.num_tokens for row in rows]
        size = self._page_size
        positions = np.concatenate([np.arange(row.start, row.start + row.num_tokens) for row in rows])
        slots = np.repeat([row.slot for row in rows], query_lens)
        write_index = self._tables[slots, positions // size].astype(np.int64) * size + positions % size
        width = -(-max(context_lens) // size)
        page_table = self._tables[[row.slot for row in rows], :width]
        # Entries past a row's own pages may be left from the slot's last owner.
        page_table[np.arange(width) >= self._num_pages[[row.slot for row in rows], None]] = 0
        metadata = AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start_R1=self._to_device(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)),
            context_lens_R=self._to_device(np.asarray(context_lens, dtype=np.int32)),
            page_table_RP=self._to_device(page_table),
            write_index_T=self._to_device(write_index),
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
            num_decode_rows=sum(length == 1 for length in query_lens),
        )
        return metadata, positions

    def _token_ids(self, rows: list[Row], last_token_S: Tensor) -> Tensor:
        known: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for row in rows:
            known.extend(row.token_ids)
            if len(row.token_ids) < row.num_tokens:
                places.append(len(known))
                slots.append(row.slot)
                known.append(0)
        token_ids_T = self._to_device(np.asarray(known, dtype=np.int64))
        if places:
            indices = self._to_device(np.asarray([places, slots], dtype=np.int64))
            token_ids_T[indices[0]] = last_token_S[indices[1]]
        return token_ids_T

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of a fresh array; to a GPU through pinned memory, so that the copy does not wait for the stream."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
