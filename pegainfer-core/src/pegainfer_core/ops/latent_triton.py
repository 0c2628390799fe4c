"""Attention over latent pages on CUDA through Triton: launches of latent_kernels.py.

Owns tiles and grids. Knows nothing of requests; ops/attention_torch.py is its oracle. As in ops/attention_triton.py, which calls this, no
launch waits for the device and every grid follows from numbers the host knows.

Shape suffixes: T tokens, H heads, X = L + R a page's row (latent vector, rotated key), P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from pegainfer_core.ops.attention import AttentionMetadata
from pegainfer_core.ops.latent_kernels import attend_latent_kernel

Parts = Callable[[int, int], tuple[int, int]]
"""From programs of a launch and its longest context to (parts, least tokens of one)."""

MOST_HEADS = 16
"""Heads of one program: results of more do not fit its registers beside as many queries."""


def attend(
    q_THX: Tensor,
    cache_PS1X: Tensor,
    out_THL: Tensor,
    metadata: AttentionMetadata,
    scale_log2: float,
    arrived: Tensor,
    parts_of: Parts,
    *,
    decode: bool,
) -> Callable[[], None]:
    """What attends for the decode rows or for the others, into their part of `out_THL`. Its memory is there already."""
    tokens, heads, width = q_THX.shape
    rank = out_THL.shape[2]
    first = 0 if decode else metadata.num_decode_rows
    num_rows = metadata.num_decode_rows if decode else len(metadata.query_lens) - first
    num_tokens = num_rows if decode else tokens - first
    exact = q_THX.dtype == torch.float32
    group = next(size for size in range(min(MOST_HEADS, heads), 0, -1) if heads % size == 0)
    block_m = max(16 if decode or exact else 32, triton.next_power_of_2(group))
    blocks = num_rows if decode else num_tokens // (block_m // group) + num_rows
    busy = num_rows if decode else num_tokens // (block_m // group) + 1
    groups = heads // group
    parts, shortest = parts_of(busy * groups, metadata.max_context_len)
    if blocks * groups > len(arrived):
        parts, shortest = 1, metadata.max_context_len
    part = lse = out_THL
    if parts > 1:
        part = torch.empty(num_tokens, heads, parts, rank, dtype=torch.float32, device=q_THX.device)
        lse = torch.empty(num_tokens, heads, parts, dtype=torch.float32, device=q_THX.device)
    assert q_THX.is_contiguous() and cache_PS1X.stride(-1) == 1, "rows must be dense"

    def launch() -> None:
        attend_latent_kernel[(blocks, groups, parts)](
            *(q_THX, cache_PS1X, out_THL, part, lse, arrived),
            *(metadata.query_start_R1, metadata.context_lens_R, metadata.page_table_RP),
            *(cache_PS1X.stride(0), cache_PS1X.stride(1), metadata.page_table_RP.stride(0)),
            *(scale_log2, first, num_rows, parts, shortest),
            GROUPS=groups,
            GROUP=group,
            RANK=rank,
            ROPE=width - rank,
            BLOCK_L=max(16, triton.next_power_of_2(rank)),
            BLOCK_R=max(16, triton.next_power_of_2(width - rank)),
            BLOCK_M=block_m,
            BLOCK_N=16 if exact or block_m > 16 else 32,
            BLOCK_C=triton.next_power_of_2(parts),
            PAGE_SIZE=cache_PS1X.shape[1],
            DECODE=decode,
            SPLIT=parts > 1,
            IEEE=exact,
            num_warps=4 if block_m == 16 else 8,
            num_stages=2 if block_m == 16 and not exact else 1,
        )

    return launch
