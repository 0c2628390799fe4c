"""A model driven step by step without an engine: pages and slots laid out by hand, logits of every token.

Owns the bookkeeping of a few requests over one small KV cache. What was never written is NaN, and pages and slots go to the next request as
the last one left them. For tests of families; nothing here is fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pegainfer_core.checkpoint import open_checkpoint
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelFamily, ModelPlan
from pegainfer_core.kv.storage import StateStorage, allocate
from pegainfer_core.model import BuildContext, ForwardBatch
from pegainfer_core.ops.attention import Attention, AttentionMetadata, make_attention_backend
from pegainfer_core.ops.states import States
from pegainfer_core.weights import load_weights

NUM_SLOTS = 16


class PagedModel:
    """A checkpoint, loaded, a cache of `num_pages` pages that requests take in a scattered order, and slots for states."""

    def __init__(
        self,
        family: ModelFamily,
        path: Path,
        *,
        page_size: int = 16,
        num_pages: int = 128,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        backend: str = "torch",
        options: Any = None,
    ) -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self.plan = plan_of(family, path, options)
        max_model_len = min(self.plan.max_context, num_pages * page_size)
        context = BuildContext(device=self.device, dtype=dtype, max_model_len=max_model_len)
        self.model = family.build(self.plan, context)
        self.num_bytes = load_weights(self.model, self.plan, path, self.device, dtype)
        self._backend = make_attention_backend(backend, self.device)
        self._caches = allocate(self.plan, num_pages, page_size, self.device, dtype)
        self._states = StateStorage(self.plan, NUM_SLOTS, 0, self.device, dtype)
        for tensor in itertools.chain(*self._caches, *self._states.layers):
            tensor.fill_(float("nan"))
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(5)) + 1
        self._free: list[int] = order.tolist()
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self._free_slots = list(range(NUM_SLOTS))
        self._slots: dict[str, int] = {}

    def forward(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """One step: append tokens to requests, new or known. Returns float32 logits [tokens, V] of each on the CPU.

        Rows with one token are put first, as the engine does.
        """
        ordered = dict(sorted(rows.items(), key=lambda row: len(row[1]) > 1))
        batch = self._batch(ordered)
        self._backend.plan(batch.attention.metadata)
        with torch.inference_mode():
            logits_TV = self.model.logits(self.model(batch)).float().cpu()
        parts = torch.split(logits_TV, [len(token_ids) for token_ids in ordered.values()])
        return dict(zip(ordered, parts, strict=True))

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits [tokens, V] of a request on its own, computed `chunk` tokens at a time (None: all at once)."""
        size = len(token_ids) if chunk is None else chunk
        starts = range(0, len(token_ids), size)
        parts = [self.forward({"alone": token_ids[start : start + size]})["alone"] for start in starts]
        self.free("alone")
        return torch.cat(parts)

    def free(self, request: str) -> None:
        """Forget a request; its pages and its slot keep their old values until they are overwritten."""
        self._free.extend(self._pages.pop(request))
        self._free_slots.insert(0, self._slots.pop(request))
        del self._lengths[request]

    def _batch(self, rows: Mapping[str, Sequence[int]]) -> ForwardBatch:
        positions: list[int] = []
        write_index: list[int] = []
        for request, token_ids in rows.items():
            start = self._lengths.get(request, 0)
            end = self._lengths[request] = start + len(token_ids)
            if request not in self._slots:
                self._slots[request] = self._free_slots.pop()
            pages = self._pages.setdefault(request, [])
            while len(pages) * self.page_size < end:
                pages.append(self._free.pop(0))
            positions += range(start, end)
            write_index += [pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(start, end)]
        token_ids = [token_id for ids in rows.values() for token_id in ids]
        metadata = self._metadata(rows, torch.tensor(write_index, device=self.device))
        fresh = [self._lengths[request] == len(ids) for request, ids in rows.items()]
        return ForwardBatch(
            token_ids_T=torch.tensor(token_ids, device=self.device),
            positions_T=torch.tensor(positions, device=self.device),
            attention=Attention(backend=self._backend, caches=self._caches, metadata=metadata),
            states=States(
                layers=self._states.layers,
                slots_R=torch.tensor([self._slots[request] for request in rows], device=self.device),
                fresh_R=torch.tensor(fresh, dtype=torch.int32, device=self.device),
                query_start_R1=metadata.query_start_R1,
                query_lens=metadata.query_lens,
                num_decode_rows=metadata.num_decode_rows,
            ),
        )

    def _metadata(self, rows: Mapping[str, Sequence[int]], write_index_T: Tensor) -> AttentionMetadata:
        query_lens = [len(token_ids) for token_ids in rows.values()]
        context_lens = [self._lengths[request] for request in rows]
        tables = [torch.tensor(self._pages[request], dtype=torch.int32) for request in rows]
        query_starts = torch.tensor([0, *query_lens]).cumsum(0)
        return AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start_R1=query_starts.to(self.device, torch.int32),
            context_lens_R=torch.tensor(context_lens, dtype=torch.int32, device=self.device),
            page_table_RP=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(self.device),
            write_index_T=write_index_T,
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
            num_decode_rows=sum(query_len == 1 for query_len in query_lens),
        )


def plan_of(family: ModelFamily, path: Path, options: Any = None) -> ModelPlan:
    """The plan of a checkpoint directory with the family's default options."""
    config = open_checkpoint(path, str(path)).config
    return family.plan(config, EngineConfig(model=str(path)), family.options() if options is None else options)
