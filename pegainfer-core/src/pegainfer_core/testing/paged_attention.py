"""Random batches for paged attention and a float64 reference: what every attention backend is tested with.

Owns the layout of a test batch: shuffled pages, and NaN wherever no row may read. Knows no backend.

Shape suffixes: T tokens, R rows, H query heads, K key/value heads, D head dim, P pages, S page size, C context tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pegainfer_core.ops.attention import Attention, AttentionBackend, AttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Inputs of one attention call over a cache that already holds every row's earlier tokens."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    caches: tuple[Tensor, Tensor]
    """Keys and values [P, S, K, D]; NaN in the places of new tokens and in those that belong to no row."""
    metadata: AttentionMetadata
    contexts: list[tuple[Tensor, Tensor]]
    """Keys and values [C, K, D] of each row, the new tokens included."""

    def run(self, backend: AttentionBackend, scale: float | None = None) -> Tensor:
        """Write and attend through `backend`, as a model does. Returns [T, H, D]."""
        attention = Attention(backend=backend, caches=[self.caches], metadata=self.metadata)
        backend.plan(self.metadata)
        return attention.run(0, self.q_THD, self.k_TKD, self.v_TKD, scale)

    def reference(self, scale: float | None = None) -> Tensor:
        """Causal softmax attention in float64, row by row. Returns [T, H, D]."""
        scale = self.q_THD.shape[-1] ** -0.5 if scale is None else scale
        out_QHD, start = [], 0
        for query_len, (k_CKD, v_CKD) in zip(self.metadata.query_lens, self.contexts, strict=True):
            q_QHD = self.q_THD[start : start + query_len].double()
            group = q_QHD.shape[1] // k_CKD.shape[1]
            k_CHD = k_CKD.double().repeat_interleave(group, 1)
            v_CHD = v_CKD.double().repeat_interleave(group, 1)
            score_HQC = torch.einsum("qhd,chd->hqc", q_QHD, k_CHD) * scale
            unseen = torch.ones(score_HQC.shape[1:], dtype=torch.bool, device=q_QHD.device)
            score_HQC = score_HQC.masked_fill(unseen.triu(len(k_CKD) - query_len + 1), float("-inf"))
            out_QHD.append(torch.einsum("hqc,chd->qhd", score_HQC.softmax(-1), v_CHD))
            start += query_len
        return torch.cat(out_QHD)


def paged_batch(
    rows: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedBatch:
    """A batch of `rows` (new tokens, context length with them) for `heads` (H, K). Leading one-token rows are decode rows."""
    generator = torch.Generator(device=device).manual_seed(seed)
    num_heads, num_kv_heads = heads
    query_lens, context_lens = [row[0] for row in rows], [row[1] for row in rows]
    pages_R = [-(-context_len // page_size) for context_len in context_lens]
    # one page more than needed before and after the shuffle: page 0 and some page inside belong to nobody
    order = torch.randperm(sum(pages_R) + 2, generator=generator, device=device).tolist()
    table_RP = torch.zeros(len(rows), max(pages_R), dtype=torch.int32)
    shape = (sum(pages_R) + 3, page_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    contexts, write_index, taken = [], [], 0
    for row, (query_len, context_len) in enumerate(rows):
        pages = [1 + page for page in order[taken : taken + pages_R[row]]]
        taken += len(pages)
        table_RP[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        places = [pages[token // page_size] * page_size + token % page_size for token in range(context_len)]
        size = (context_len, num_kv_heads, head_dim)
        k_CKD, v_CKD = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))
        earlier = torch.tensor(places[: context_len - query_len], dtype=torch.int64, device=device)
        k_cache.flatten(0, 1)[earlier] = k_CKD[: len(earlier)]
        v_cache.flatten(0, 1)[earlier] = v_CKD[: len(earlier)]
        write_index += places[context_len - query_len :]
        contexts.append((k_CKD, v_CKD))
    new = list(zip(query_lens, contexts, strict=True))
    query_start = torch.tensor([0, *query_lens]).cumsum(0)
    num_decode_rows = next((row for row, query_len in enumerate(query_lens) if query_len > 1), len(rows))
    q_size = (sum(query_lens), num_heads, head_dim)
    return PagedBatch(
        q_THD=torch.randn(q_size, generator=generator, device=device).to(dtype),
        k_TKD=torch.cat([k_CKD[-query_len:] for query_len, (k_CKD, _) in new]),
        v_TKD=torch.cat([v_CKD[-query_len:] for query_len, (_, v_CKD) in new]),
        caches=(k_cache, v_cache),
        contexts=contexts,
        metadata=AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start_R1=query_start.to(device, torch.int32),
            context_lens_R=torch.tensor(context_lens, dtype=torch.int32, device=device),
            page_table_RP=table_RP.to(device),
            write_index_T=torch.tensor(write_index, dtype=torch.int64, device=device),
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
            num_decode_rows=num_decode_rows,
        ),
    )
