"""Attention over pages with torch alone: row by row, the oracle of every other backend, and batched, the CPU path.

Owns the two backends. Knows nothing of requests or scheduling.

Shape suffixes: T tokens, R rows, H query heads, K key/value heads, G query heads of one kv head, D head dim, P pages,
S page size, Q new tokens of a row, C context tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pegainfer_core.ops.attention import AttentionBackend, AttentionMetadata, LatentHeads
from pegainfer_core.ops.cpu_native import MOST_CONTEXT, MOST_ROWS, kernels
from pegainfer_core.ops.dispatch import use_cpu

GROUP_TOKENS = 4096
"""Context tokens that are gathered at once: memory for more goes back to the system after each layer, and faults in anew."""


class TorchAttention(AttentionBackend):
    """Row by row with scaled_dot_product_attention over the gathered pages."""

    name = "torch"

    def plan(self, metadata: AttentionMetadata) -> None:
        """Nothing to prepare."""

    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend."""
        page_size = k_cache_PSKD.shape[1]
        out_THD = q_THD.new_empty(*q_THD.shape[:2], v_cache_PSKD.shape[3])
        start = 0
        for row, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            pages = metadata.page_table_RP[row, : -(-context_len // page_size)].long()
            k_CKD = k_cache_PSKD[pages].flatten(0, 1)[:context_len]
            v_CKD = v_cache_PSKD[pages].flatten(0, 1)[:context_len]
            q_QHD = q_THD[start : start + query_len]
            mask = None
            if query_len > 1:
                offset = context_len - query_len
                mask = torch.ones(query_len, context_len, dtype=torch.bool, device=q_THD.device).tril(offset)
            out_HQD = F.scaled_dot_product_attention(
                q_QHD.transpose(0, 1).unsqueeze(0),
                k_CKD.transpose(0, 1).unsqueeze(0),
                v_CKD.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )[0]
            out_THD[start : start + query_len] = out_HQD.transpose(0, 1)
            start += query_len
        return out_THD

    def attend_latent(
        self, heads: LatentHeads, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend. Rows of one token absorbed, others expanded."""
        page_size = k_cache_PSKD.shape[1]
        out_THV = heads.q_THD.new_empty(*heads.q_THD.shape[:2], heads.value_dim)
        start = 0
        for row, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            pages = metadata.page_table_RP[row, : -(-context_len // page_size)].long()
            rows_CX = k_cache_PSKD[pages].flatten(0, 2)[:context_len]
            tokens = slice(start, start + query_len)
            start += query_len
            if query_len == 1:
                q_HX = heads.absorbed(tokens)[0]
                weight_HC = (q_HX @ rows_CX.T * scale).float().softmax(-1).to(rows_CX.dtype)
                out_THV[tokens] = heads.values((weight_HC @ rows_CX[:, : v_cache_PSKD.shape[3]])[None])
                continue
            k_CHD, v_CHV = heads.expanded(rows_CX)
            score_HQC = torch.einsum("qhd,chd->hqc", heads.q_THD[tokens], k_CHD) * scale
            unseen_QC = torch.ones(query_len, context_len, dtype=torch.bool, device=rows_CX.device)
            unseen_QC = unseen_QC.triu(context_len - query_len + 1)
            weight_HQC = score_HQC.masked_fill(unseen_QC, -torch.inf).float().softmax(-1).to(rows_CX.dtype)
            out_THV[tokens] = torch.einsum("hqc,chv->qhv", weight_HQC, v_CHV)
        return out_THV


class BatchedTorchAttention(AttentionBackend):
    """Few decode rows by our C kernel. Else those of similar length together, and prompt rows one by one.

    What all layers need is prepared once per step.
    """

    name = "torch-batched"

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._few = False

    def plan(self, metadata: AttentionMetadata) -> None:
        """The page size and the type come with the first layer, so the work is done there."""
        self._step = None
        only_decode = metadata.num_decode_rows == len(metadata.query_lens) <= MOST_ROWS
        self._few = only_decode and sum(metadata.context_lens) <= MOST_CONTEXT

    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend."""
        if (
            self._few
            and v_cache_PSKD.shape == k_cache_PSKD.shape
            and use_cpu(q_THD)
            and (native := kernels(q_THD.dtype))
        ):
            caches_PSKD = (k_cache_PSKD, v_cache_PSKD)
            lens_R, longest = metadata.context_lens_R, metadata.max_context_len
            return native.attend(q_THD, caches_PSKD, metadata.page_table_RP, lens_R, longest, scale)
        decode, prompts = self._prepared(metadata, k_cache_PSKD.shape[1], q_THD.dtype)
        if len(decode) == 1 and not prompts:
            return _attend_decode(q_THD, k_cache_PSKD, v_cache_PSKD, decode[0], scale)
        out_THD = q_THD.new_empty(*q_THD.shape[:2], v_cache_PSKD.shape[3])
        for group in decode:
            rows = slice(0, metadata.num_decode_rows) if group.rows is None else group.rows
            out_THD[rows] = _attend_decode(q_THD[rows], k_cache_PSKD, v_cache_PSKD, group, scale)
        for prompt in prompts:
            k_1KCD, v_1KCD = prompt.context.read(k_cache_PSKD), prompt.context.read(v_cache_PSKD)
            out_THD[prompt.tokens] = _attend_prompt(q_THD[prompt.tokens], k_1KCD, v_1KCD, prompt, scale)
        return out_THD

    def attend_latent(
        self, heads: LatentHeads, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend. Decode rows absorbed, prompt rows expanded."""
        q_THD = heads.q_THD
        decode, prompts = self._prepared(metadata, k_cache_PSKD.shape[1], q_THD.dtype)
        out_THV = q_THD.new_empty(*q_THD.shape[:2], heads.value_dim)
        first = slice(0, metadata.num_decode_rows)
        q_RHX = heads.absorbed(first) if decode else q_THD
        found_RHL = q_RHX.new_empty(metadata.num_decode_rows, q_RHX.shape[1], v_cache_PSKD.shape[3])
        for group in decode:
            rows = first if group.rows is None else group.rows
            found_RHL[rows] = _attend_decode(q_RHX[rows], k_cache_PSKD, v_cache_PSKD, group, scale)
        if decode:
            out_THV[first] = heads.values(found_RHL)
        for prompt in prompts:
            k_CHD, v_CHV = heads.expanded(prompt.context.read(k_cache_PSKD)[0, 0])
            k_1HCD, v_1HCV = k_CHD.transpose(0, 1)[None], v_CHV.transpose(0, 1)[None]
            out_THV[prompt.tokens] = _attend_prompt(q_THD[prompt.tokens], k_1HCD, v_1HCV, prompt, scale)
        return out_THV

    def _prepared(self, metadata: AttentionMetadata, page_size: int, dtype: torch.dtype) -> _Step:
        if self._step is None:
            self._step = _prepare(metadata, page_size, dtype)
        return self._step


# preparation, once per step


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """Where one or more contexts of C tokens, padding included, lie in the cache."""

    num_rows: int
    first: int | None
    """Start of the tokens, if there is one row and its pages are neighbours: then nothing is copied."""
    num_tokens: int
    """C."""
    index: Tensor
    """int64 [R * C], if they are no neighbours."""

    def read(self, cache_PSKD: Tensor) -> Tensor:
        """[R, K, C, D]."""
        _, _, heads, size = cache_PSKD.shape
        token = cache_PSKD.stride(1)
        if self.first is not None:
            place = cache_PSKD.storage_offset() + self.first * token
            return cache_PSKD.as_strided((1, heads, self.num_tokens, size), (0, size, token, 1), place)
        rows = cache_PSKD.flatten(0, 1).index_select(0, self.index)
        return rows.view(self.num_rows, self.num_tokens, heads, size).transpose(1, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: Tensor | None
    """int64; None: all decode rows, in their order."""
    context: _Context
    mask_R11C: Tensor | None
    """0 or -inf, in the queries' type; None where no row is padded."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: slice
    context: _Context
    mask_QC: Tensor | None
    """None: the row has no earlier tokens, plain causal attention."""


_Step = tuple[list[_DecodeGroup], list[_Prompt]]


def _prepare(metadata: AttentionMetadata, page_size: int, dtype: torch.dtype) -> _Step:
    tables_RP = metadata.page_table_RP.numpy()
    decode_lens = metadata.context_lens[: metadata.num_decode_rows]
    groups = [_decode_group(rows, decode_lens, tables_RP, page_size, dtype) for rows in group_rows(decode_lens)]
    prompts: list[_Prompt] = []
    start = metadata.num_decode_rows
    for row in range(metadata.num_decode_rows, len(metadata.query_lens)):
        query_len, context_len = metadata.query_lens[row], metadata.context_lens[row]
        context = _context(tables_RP[row : row + 1], [context_len], page_size)
        mask_QC = None
        if context_len > query_len:
            unseen = torch.full((query_len, context_len), -torch.inf, dtype=dtype)
            mask_QC = unseen.triu_(context_len - query_len + 1)
        prompts.append(_Prompt(slice(start, start + query_len), context, mask_QC))
        start += query_len
    return groups, prompts


def group_rows(lens: Sequence[int]) -> list[list[int]]:
    """Row numbers in groups of similar length: at most half of what a group reads is padding. Short batches stay in order."""
    order = sorted(range(len(lens)), key=lambda row: -lens[row])
    groups: list[list[int]] = []
    for row in order:
        longest = lens[groups[-1][0]] if groups else 0
        if groups and 2 * lens[row] >= longest and (len(groups[-1]) + 1) * longest <= GROUP_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def _decode_group(
    rows: list[int], lens: Sequence[int], tables_RP: np.ndarray, page_size: int, dtype: torch.dtype
) -> _DecodeGroup:
    group_lens = [lens[row] for row in rows]
    mask = None
    if min(group_lens) < max(group_lens):
        padding_RC = np.arange(max(group_lens)) >= np.asarray(group_lens)[:, None]
        mask_RC = torch.zeros(padding_RC.shape, dtype=dtype).masked_fill_(torch.from_numpy(padding_RC), -torch.inf)
        mask = mask_RC[:, None, None]
    everything = len(rows) == len(lens)
    return _DecodeGroup(
        None if everything else torch.tensor(rows), _context(tables_RP[rows], group_lens, page_size), mask
    )


def _context(tables_RP: np.ndarray, lens: Sequence[int], page_size: int) -> _Context:
    longest = max(lens)
    tables_RP = tables_RP[:, : -(-longest // page_size)].astype(np.int64)
    if len(lens) == 1 and (np.diff(tables_RP[0]) == 1).all():
        return _Context(1, int(tables_RP[0, 0]) * page_size, longest, torch.empty(0, dtype=torch.int64))
    places_RPS = tables_RP[:, :, None] * page_size + np.arange(page_size)
    places_RC = places_RPS.reshape(len(lens), -1)[:, :longest]
    # padding reads the row's first token: anything but what nobody wrote, which may be NaN
    index_RC = np.where(np.arange(longest) < np.asarray(lens)[:, None], places_RC, places_RC[:, :1])
    return _Context(len(lens), None, longest, torch.from_numpy(index_RC.reshape(-1)))


# one layer


def _attend_decode(q_RHD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, group: _DecodeGroup, scale: float) -> Tensor:
    """The query heads of one kv head go through as so many queries, so that no key is copied for them."""
    rows, _, size = q_RHD.shape
    q_RKGD = q_RHD.view(rows, k_PSKD.shape[2], -1, size)
    k_RKCD, v_RKCD = group.context.read(k_PSKD), group.context.read(v_PSKD)
    out_RKGD = F.scaled_dot_product_attention(q_RKGD, k_RKCD, v_RKCD, attn_mask=group.mask_R11C, scale=scale)
    return out_RKGD.flatten(1, 2)


def _attend_prompt(q_QHD: Tensor, k_1KCD: Tensor, v_1KCD: Tensor, prompt: _Prompt, scale: float) -> Tensor:
    out_1HQD = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1).unsqueeze(0),
        k_1KCD,
        v_1KCD,
        attn_mask=prompt.mask_QC,
        is_causal=prompt.mask_QC is None,
        scale=scale,
        enable_gqa=True,
    )
    return out_1HQD[0].transpose(0, 1)
