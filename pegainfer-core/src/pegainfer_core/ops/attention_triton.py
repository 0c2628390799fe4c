"""Attention over pages on CUDA through Triton: prompts, chunks, decode rows and any mixture of them.

Owns the launches: tiles, grids, and the rule that splits a long context over several programs. Knows nothing of
requests; the torch backend in ops/attention.py is its oracle. Invariant: no launch waits for the device, and every grid
follows from numbers the host knows (rows, tokens, max_query_len, max_context_len), so that a captured launch stays
right while contexts grow below that bound.

Shape suffixes: T tokens, R rows, H query heads, K key/value heads, D head dim, P pages, S page size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from pegainfer_core.ops import latent_triton, token_triton
from pegainfer_core.ops.attention import AttentionBackend, AttentionMetadata, StackedHeads
from pegainfer_core.ops.attention_kernels import attend_kernel, write_kernel
from pegainfer_core.ops.decode_kernels import decode_kernel

LOG2_E = 1.4426950408889634
MOST_ARRIVALS = 1 << 16
"""Tiles (query blocks x kv heads) that may be split at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Shape of one program of the attention kernel."""

    queries: int
    """BLOCK_M: query rows, a power of two of at least 16."""
    keys: int
    """BLOCK_N: keys of one turn of the loop, a power of two of at least 16."""
    warps: int
    stages: int
    """Depth of the software pipeline."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Into how many parts contexts are split: from bounds the host knows; a row divides its own length on the device.

    Where few rows leave the device idle, parts are added until `programs` programs are in flight, each of at least
    `shortest` tokens. Otherwise only rows longer than `longest` are split, so that one long row of a large batch does
    not run alone at the end. Measured in benchmarks/results/2026-12-01-h200-spine.json (sweep).
    """

    programs: int
    shortest: int
    longest: int
    most: int = 32
    """Bound on the parts of one row; 1 turns splitting off."""

    def parts(self, programs: int, max_context_len: int) -> tuple[int, int]:
        """(parts, least tokens of one) for a launch of `programs` (query blocks x kv heads) and its longest row."""
        to_fill = min(self.programs // max(programs, 1), _cdiv(max_context_len, self.shortest), self.most)
        if to_fill > 1:
            return to_fill, self.shortest
        return max(1, min(_cdiv(max_context_len, self.longest), self.most)), self.longest


class TritonAttention(AttentionBackend):
    """For CUDA GPUs of compute capability 8.0 or later; with TRITON_INTERPRET=1 also for CPU tensors (tests)."""

    name = "triton"
    takes_heads = True
    side_by_side = True
    """Decode rows, bound by memory, run beside prompts, bound by arithmetic."""

    def __init__(self, device: torch.device, split_rule: SplitRule | None = None) -> None:
        """`split_rule`, for decode rows and prompts alike, defaults to one for each, which fills the device twice over."""
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        programs = 2 * self._processors
        self._decode_split = split_rule or SplitRule(programs=programs, shortest=128, longest=8192)
        # most of a prompt's parts are empty: its context is seldom as long as the bound
        self._prompt_split = split_rule or SplitRule(programs=4 * programs, shortest=512, longest=8192)
        self._side = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._arrived = torch.zeros(2, MOST_ARRIVALS, dtype=torch.int32, device=device)
        """Parts that are done, of each tile of prompts and of each tile of decode rows; 0 between launches."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Nothing to prepare: grids follow from the metadata's host numbers, rows are looked up on the device."""
        assert all(length == 1 for length in metadata.query_lens[: metadata.num_decode_rows]), "decode rows must lead"

    def tile(self, dtype: torch.dtype, head_dim: int, rows: int, work: int) -> Tile:
        """The tile for `rows` query rows (tokens x group) in the longest row, of `work` in all (tokens x heads).

        All fit in 99 KiB of shared memory.
        """
        wide = head_dim > 128
        if dtype == torch.float32:
            # exact products run on the general units: small tiles, or registers spill
            return Tile(queries=16, keys=16 if wide else 32, warps=8, stages=2)
        if rows <= 16:
            return Tile(queries=16, keys=32 if wide else 128, warps=4, stages=2)
        if rows <= 64 or wide or work < 128 * 2 * self._processors:
            return Tile(queries=64, keys=32 if wide else 64, warps=4, stages=2)
        return Tile(queries=128, keys=32, warps=4, stages=3)

    def write(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, write_index_T: Tensor
    ) -> None:
        """See AttentionBackend."""
        _, num_kv_heads, head_dim = k_TKD.shape
        _check_layout(k_TKD, v_TKD, k_cache_PSKD, v_cache_PSKD)
        assert k_cache_PSKD.stride(0) == k_cache_PSKD.shape[1] * k_cache_PSKD.stride(1), "slots must be evenly spaced"
        block = triton.next_power_of_2(num_kv_heads * head_dim)
        write_kernel[(k_TKD.shape[0],)](
            k_TKD,
            v_TKD,
            k_cache_PSKD,
            v_cache_PSKD,
            write_index_T,
            *(k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1)),
            *(k_cache_PSKD.stride(1), k_cache_PSKD.stride(2)),
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
        )

    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend. Decode rows have a launch with tiles of one token, the other rows one of their own."""
        _check_layout(q_THD, k_cache_PSKD, v_cache_PSKD)
        assert scale > 0.0, "the running maximum is taken before scaling"
        if v_cache_PSKD.shape != k_cache_PSKD.shape:
            return self._run_shared(q_THD, k_cache_PSKD, v_cache_PSKD, metadata, scale)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        decode, prompts = (
            functools.partial(self._attend, q_THD, k_cache_PSKD, v_cache_PSKD, metadata, scale, out_THD, decode=kind)
            for kind in (True, False)
        )
        self._side_by_side(metadata, decode, prompts)
        return out_THD

    def _run_shared(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """`run` where values are the first part of keys."""
        assert v_cache_PSKD.data_ptr() == k_cache_PSKD.data_ptr() and k_cache_PSKD.shape[2] == 1, "one latent head"
        out_THL = torch.empty(*q_THD.shape[:2], v_cache_PSKD.shape[3], dtype=q_THD.dtype, device=q_THD.device)
        decode, prompts = (
            functools.partial(
                latent_triton.attend,
                *(q_THD, k_cache_PSKD, out_THL, metadata, scale * LOG2_E),
                *(self._arrived[int(kind)], (self._decode_split if kind else self._prompt_split).parts),
                decode=kind,
            )
            for kind in (True, False)
        )
        self._side_by_side(metadata, decode, prompts)
        return out_THL

    def attend_heads(
        self,
        heads: StackedHeads,
        k_cache_PSKD: Tensor,
        v_cache_PSKD: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """See AttentionBackend. Decode rows go from the projection to the result in one launch."""
        assert scale > 0.0, "the running maximum is taken before scaling"
        qkv_TND, rows = heads.qkv_TND, metadata.num_decode_rows
        kv_heads = k_cache_PSKD.shape[2]
        size = (qkv_TND.shape[0], qkv_TND.shape[1] - 2 * kv_heads, qkv_TND.shape[2])
        out_THD = torch.empty(size, dtype=qkv_TND.dtype, device=qkv_TND.device)
        _check_layout(qkv_TND, k_cache_PSKD, v_cache_PSKD)

        def prompts() -> Callable[[], None]:
            q_THD = torch.empty_like(out_THD)
            launch = self._attend(q_THD, k_cache_PSKD, v_cache_PSKD, metadata, scale, out_THD, decode=False)

            def rotate_and_attend() -> None:
                token_triton.rotate_and_store(
                    *(qkv_TND[rows:], heads.norms, heads.tables, heads.positions_T[rows:]),
                    *((k_cache_PSKD, v_cache_PSKD), metadata.write_index_T[rows:], q_THD[rows:]),
                )
                launch()

            return rotate_and_attend

        decode = functools.partial(self._decode, heads, k_cache_PSKD, v_cache_PSKD, metadata, scale, out_THD)
        self._side_by_side(metadata, decode, prompts)
        return out_THD

    def _side_by_side(
        self,
        metadata: AttentionMetadata,
        decode: Callable[[], Callable[[], None]],
        prompts: Callable[[], Callable[[], None]],
    ) -> None:
        """Launch what there is of both. Each gives its launch once its memory is there: on the stream that frees it again."""
        rows = metadata.num_decode_rows
        launches = [prepare() for prepare, any_ in ((decode, rows), (prompts, len(metadata.query_lens) - rows)) if any_]
        if len(launches) == 1 or not self.side_by_side or self._side is None:
            for launch in launches:
                launch()
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            launches[0]()
        launches[1]()
        torch.cuda.current_stream().wait_stream(self._side)

    def _decode(
        self,
        heads: StackedHeads,
        k_cache_PSKD: Tensor,
        v_cache_PSKD: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out_THD: Tensor,
    ) -> Callable[[], None]:
        """What turns the decode rows' heads, stores their keys and values, and attends, into their part of `out_THD`."""
        rows, qkv_TND = metadata.num_decode_rows, heads.qkv_TND
        num_heads, head_dim = out_THD.shape[1:]
        page_size, kv_heads = k_cache_PSKD.shape[1:3]
        group = num_heads // kv_heads
        tile = self.tile(qkv_TND.dtype, head_dim, group, rows * num_heads)
        if rows * kv_heads >= 2 * self._processors and tile.keys > 64:
            tile = Tile(
                queries=16, keys=64, warps=2, stages=2
            )  # the device is full of programs: small ones fill it better
        parts, shortest = self._decode_split.parts(rows * kv_heads, metadata.max_context_len)
        if rows * kv_heads > MOST_ARRIVALS:
            parts, shortest = 1, metadata.max_context_len
        part, lse = self._parts(out_THD, rows, parts)
        query_weight, key_weight, eps = (qkv_TND, qkv_TND, 0.0) if heads.norms is None else heads.norms

        def launch() -> None:
            decode_kernel[(rows, kv_heads, parts)](
                *(qkv_TND, query_weight, key_weight, *heads.tables, heads.positions_T, metadata.write_index_T),
                *(k_cache_PSKD, v_cache_PSKD, out_THD, part, lse, self._arrived[1]),
                *(metadata.context_lens_R, metadata.page_table_RP),
                *(qkv_TND.stride(0), *k_cache_PSKD.stride()[:3], metadata.page_table_RP.stride(0)),
                *(eps, scale * LOG2_E, parts, shortest),
                NORM=heads.norms is not None,
                KV_HEADS=kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
                BLOCK_M=max(tile.queries, triton.next_power_of_2(group)),
                BLOCK_N=tile.keys,
                BLOCK_C=triton.next_power_of_2(parts),
                PAGE_SIZE=page_size,
                SPLIT=parts > 1,
                IEEE=qkv_TND.dtype == torch.float32,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )

        return launch

    def _parts(self, out_THD: Tensor, num_tokens: int, parts: int) -> tuple[Tensor, Tensor]:
        """Where the parts' results and log2-sums pass through."""
        if parts == 1:
            return out_THD, out_THD
        size = (num_tokens, out_THD.shape[1], parts)
        part = torch.empty(*size, out_THD.shape[2], dtype=torch.float32, device=out_THD.device)
        return part, torch.empty(size, dtype=torch.float32, device=out_THD.device)

    def _attend(
        self,
        q_THD: Tensor,
        k_cache_PSKD: Tensor,
        v_cache_PSKD: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out_THD: Tensor,
        decode: bool,
    ) -> Callable[[], None]:
        """What attends for the decode rows or for the others, into their part of `out_THD`. Its memory is there already."""
        tokens, heads, head_dim = q_THD.shape
        page_size, kv_heads = k_cache_PSKD.shape[1:3]
        group = heads // kv_heads
        first = 0 if decode else metadata.num_decode_rows
        num_rows = metadata.num_decode_rows if decode else len(metadata.query_lens) - first
        num_tokens = num_rows if decode else tokens - first
        tile = self.tile(q_THD.dtype, head_dim, group if decode else group * metadata.max_query_len, num_tokens * heads)
        block_m = max(tile.queries, triton.next_power_of_2(group))
        blocks = num_rows if decode else num_tokens // (block_m // group) + num_rows
        # `blocks` leaves room for partial blocks of every row; about this many have work
        busy = num_rows if decode else num_tokens // (block_m // group) + 1
        split_rule = self._decode_split if decode else self._prompt_split
        parts, shortest = split_rule.parts(busy * kv_heads, metadata.max_context_len)
        block_d = max(16, triton.next_power_of_2(head_dim))
        if blocks * kv_heads > MOST_ARRIVALS:
            parts, shortest = 1, metadata.max_context_len
        part, lse = self._parts(out_THD, num_tokens, parts)

        def launch() -> None:
            attend_kernel[(blocks, kv_heads, parts)](
                q_THD,
                k_cache_PSKD,
                v_cache_PSKD,
                out_THD,
                part,
                lse,
                self._arrived[int(decode)],
                metadata.query_start_R1,
                metadata.context_lens_R,
                metadata.page_table_RP,
                *(q_THD.stride(0), q_THD.stride(1)),
                *k_cache_PSKD.stride()[:3],
                metadata.page_table_RP.stride(0),
                scale * LOG2_E,
                *(first, num_rows, parts, shortest),
                KV_HEADS=kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_D=block_d,
                BLOCK_M=block_m,
                BLOCK_N=tile.keys,
                BLOCK_C=triton.next_power_of_2(parts),
                PAGE_SIZE=page_size,
                DECODE=decode,
                SPLIT=parts > 1,
                IEEE=q_THD.dtype == torch.float32,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )

        return launch


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _check_layout(*tensors: Tensor) -> None:
    """The kernels want dense heads, and one layout for keys and values (the last two tensors)."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "the head dimension must be dense"
    assert tensors[-1].stride() == tensors[-2].stride(), "key and value pages must have one layout"
