"""Random batches for attention over latent pages and a float64 reference: what every backend is tested with.

Owns the layout of a test batch: shuffled pages, and NaN wherever no row may read. Knows no backend.

Shape suffixes: T tokens, R rows, H heads, D head dim of queries and keys, V of values, X values of a page's row, L its latent part,
U rows of one head in the projection, C context tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pegainfer_core.ops.attention import Attention, AttentionBackend, AttentionMetadata, LatentHeads
from pegainfer_core.testing.paged_attention import paged_batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentBatch:
    """Inputs of one call over pages that already hold every row's earlier tokens."""

    heads: LatentHeads
    rows_TX: Tensor
    caches: tuple[Tensor, Tensor]
    """As `kv.storage.allocate` lays them out; NaN in the places of new tokens and in those that belong to no row."""
    metadata: AttentionMetadata
    contexts: list[Tensor]
    """[C, X] of each row, the new tokens included."""
    scale: float = 0.17

    def run(self, backend: AttentionBackend) -> Tensor:
        """Write and attend through `backend`, as a model does. Returns [T, H, V]."""
        attention = Attention(backend=backend, caches=[self.caches], metadata=self.metadata)
        backend.plan(self.metadata)
        return attention.run_latent(0, self.rows_TX, self.heads, self.scale)

    def reference(self) -> Tensor:
        """Each head's keys and values written out, causal softmax attention in float64, row by row. Returns [T, H, V]."""
        up_HUL = self.heads.up_HUL.double()
        rank, value_dim = up_HUL.shape[2], self.heads.value_dim
        out_QHV, start = [], 0
        for query_len, rows_CX in zip(self.metadata.query_lens, self.contexts, strict=True):
            q_QHD = self.heads.q_THD[start : start + query_len].double()
            start += query_len
            heads = []
            for head, up_UL in enumerate(up_HUL):
                both_CU = rows_CX[:, :rank].double() @ up_UL.T
                key_CD = torch.cat((both_CU[:, :-value_dim], rows_CX[:, rank:].double()), dim=1)
                score_QC = q_QHD[:, head] @ key_CD.T * self.scale
                unseen_QC = torch.ones(score_QC.shape, dtype=torch.bool, device=score_QC.device)
                score_QC = score_QC.masked_fill(unseen_QC.triu(len(rows_CX) - query_len + 1), float("-inf"))
                heads.append(score_QC.softmax(-1) @ both_CU[:, -value_dim:])
            out_QHV.append(torch.stack(heads, dim=1))
        return torch.cat(out_QHV)


def latent_batch(
    rows: Sequence[tuple[int, int]],
    *,
    heads: int,
    rank: int,
    key_dim: int,
    rope_dim: int,
    value_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LatentBatch:
    """A batch of `rows` (new tokens, context length with them). Leading one-token rows are decode rows."""
    # one key head as wide as a page's row: its pages, places and contexts are what is needed here
    paged = paged_batch(
        rows, heads=(1, 1), head_dim=rank + rope_dim, page_size=page_size, dtype=dtype, device=device, seed=seed
    )
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    tokens = len(paged.q_THD)
    q_THD = torch.randn((tokens, heads, key_dim + rope_dim), generator=generator, device=device)
    up_HUL = torch.randn((heads, key_dim + value_dim, rank), generator=generator, device=device) * rank**-0.5
    return LatentBatch(
        heads=LatentHeads(q_THD=q_THD.to(dtype), up_HUL=up_HUL.to(dtype), value_dim=value_dim),
        rows_TX=paged.k_TKD[:, 0],
        caches=(paged.caches[0], paged.caches[0][..., :rank]),
        metadata=paged.metadata,
        contexts=[k_CKD[:, 0] for k_CKD, _ in paged.contexts],
    )
