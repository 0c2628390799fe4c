"""Attention over pages: the interface of backends, and what a model calls.

Owns what a step's attention needs (`AttentionMetadata`) and the choice of backend. Knows nothing of requests or scheduling.

Shape suffixes: T tokens, R rows, H query heads, K key/value heads, D head dim, P pages of the longest row, S page size; of latent layers
L rank, N dimensions of a head's key that are not rotated, V dimensions of its value.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Which pages each row reads and where its new tokens are written. Every row attends causally to its own context."""

    query_lens: list[int]
    """New tokens per row, on the host."""
    context_lens: list[int]
    """Tokens per row including the new ones, on the host."""
    query_start_R1: Tensor
    """int32, cumulative `query_lens` with a leading 0."""
    context_lens_R: Tensor
    """int32."""
    page_table_RP: Tensor
    """int32; row r uses the first ceil(context / S) entries, the rest are 0."""
    write_index_T: Tensor
    """int64: page * S + offset of every new token."""
    max_query_len: int
    max_context_len: int
    num_decode_rows: int
    """The first rows, each with one new token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedHeads:
    """A layer's projections of a step, before norm and rotation, and what turns them into attention's inputs."""

    qkv_TND: Tensor
    """Heads side by side: queries, keys, values."""
    norms: tuple[Tensor, Tensor, float] | None
    """RMS norm of each query and each key head: two weights [D], and epsilon."""
    tables: tuple[Tensor, Tensor]
    """Cosines and sines of the rotation, [positions, D / 2]."""
    positions_T: Tensor
    """int64."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Queries of a latent layer, and what turns the vectors in its pages into each head's keys and values.

    Two forms give the same: expanded, keys and values of every head are computed from the context's vectors; absorbed, queries are
    taken to the vectors' space, where all heads attend to the same rows, and what they find is taken back.
    """

    q_THD: Tensor
    """Each head: N dimensions, then those that are rotated, rotated."""
    up_HUL: Tensor
    """U = N + V rows of each head: of its key, then of its value."""
    value_dim: int
    """V."""

    def absorbed(self, tokens: slice) -> Tensor:
        """Queries of some tokens that attend to the pages' rows directly, [T, H, L + rotated]."""
        size = self.up_HUL.shape[1] - self.value_dim
        q_THD = self.q_THD[tokens]
        in_space_HTL = q_THD[..., :size].transpose(0, 1) @ self.up_HUL[:, :size]
        return torch.cat((in_space_HTL.transpose(0, 1), q_THD[..., size:]), dim=-1)

    def values(self, found_THL: Tensor) -> Tensor:
        """What absorbed queries found, as values of heads, [T, H, V]."""
        value_HVL = self.up_HUL[:, self.up_HUL.shape[1] - self.value_dim :]
        return (found_THL.transpose(0, 1) @ value_HVL.transpose(1, 2)).transpose(0, 1)

    def expanded(self, rows_CX: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [C, H, D] and values [C, H, V] of some of the pages' rows [C, L + rotated]."""
        heads, size, rank = self.up_HUL.shape
        latent_CL, shared_CX = rows_CX[:, :rank], rows_CX[:, None, rank:]
        up_CHU = (latent_CL @ self.up_HUL.view(-1, rank).T).view(-1, heads, size)
        key_CHN, value_CHV = torch.split(up_CHU, [size - self.value_dim, self.value_dim], dim=-1)
        return torch.cat((key_CHN, shared_CX.expand(-1, heads, -1)), dim=-1), value_CHV


class AttentionBackend(ABC):
    """One way to attend over pages. Stateless between steps apart from workspace."""

    name: str
    takes_heads = False
    """Whether `attend_heads` is there: norm, rotation, page writes and attention in fewer passes."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Host work once per step, before the first layer."""

    def write(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, write_index_T: Tensor
    ) -> None:
        """Scatter the step's new keys and values to their places in the pages."""
        write_kv(k_TKD, v_TKD, k_cache_PSKD, v_cache_PSKD, write_index_T)

    def write_rows(self, rows_TX: Tensor, cache_PS1X: Tensor, write_index_T: Tensor) -> None:
        """Scatter a latent layer's new rows to their places in the pages."""
        cache_PS1X.flatten(0, 2).index_copy_(0, write_index_T, rows_TX)

    @abstractmethod
    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """Attend; keys and values of the step are already in the caches. Returns [T, H, D] in q's dtype.

        Values may be narrower than keys where they are the keys' first part: the result is as wide as they are.
        """

    def attend_latent(
        self, heads: LatentHeads, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """Attend in a latent layer whose pages hold the step's vectors already. Returns [T, H, V]. Default: absorbed."""
        found_THL = self.run(heads.absorbed(slice(None)), k_cache_PSKD, v_cache_PSKD, metadata, scale)
        return heads.values(found_THL)

    def attend_heads(
        self,
        heads: StackedHeads,
        k_cache_PSKD: Tensor,
        v_cache_PSKD: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Norm, rotation, `write` and `run`; called only where `takes_heads`. Returns [T, H, D]."""
        raise NotImplementedError(f"{self.name} attention takes queries, keys and values")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A step's attention, bound to the KV storage: what a model calls."""

    backend: AttentionBackend
    caches: list[tuple[Tensor, Tensor]]
    """(keys, values) per model layer, each [pages, S, K, D]; in latent layers K is 1 and values are the first part of keys."""
    metadata: AttentionMetadata

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float | None = None) -> Tensor:
        """Store the new keys and values of `layer`, then attend causally. `scale` defaults to D ** -0.5."""
        self.store(layer, k_TKD, v_TKD)
        return self.attend(layer, q_THD, scale)

    def store(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """The first half of `run`."""
        self.backend.write(k_TKD, v_TKD, *self.caches[layer], self.metadata.write_index_T)

    def attend(self, layer: int, q_THD: Tensor, scale: float | None = None) -> Tensor:
        """The second half of `run`: keys and values of the step are in the pages already."""
        k_cache, v_cache = self.caches[layer]
        return self.backend.run(
            q_THD, k_cache, v_cache, self.metadata, q_THD.shape[-1] ** -0.5 if scale is None else scale
        )

    def run_latent(self, layer: int, rows_TX: Tensor, heads: LatentHeads, scale: float) -> Tensor:
        """Store a latent layer's new rows (vector, then the key that all heads share), then attend causally: [T, H, V]."""
        rows_PS1X, values_PS1L = self.caches[layer]
        self.backend.write_rows(rows_TX, rows_PS1X, self.metadata.write_index_T)
        return self.backend.attend_latent(heads, rows_PS1X, values_PS1L, self.metadata, scale)

    def attend_heads(self, layer: int, heads: StackedHeads, scale: float | None = None) -> Tensor:
        """`run` from stacked projections, where the backend takes them."""
        k_cache, v_cache = self.caches[layer]
        scale = heads.qkv_TND.shape[-1] ** -0.5 if scale is None else scale
        return self.backend.attend_heads(heads, k_cache, v_cache, self.metadata, scale)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, write_index_T: Tensor) -> None:
    """Scatter new keys and values to their places in the pages."""
    k_cache_PSKD.flatten(0, 1).index_copy_(0, write_index_T, k_TKD)
    v_cache_PSKD.flatten(0, 1).index_copy_(0, write_index_T, v_TKD)


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend for a resolved name; the only place that chooses and imports one."""
    if name in ("torch", "torch-batched"):
        from pegainfer_core.ops.attention_torch import BatchedTorchAttention, TorchAttention

        return TorchAttention() if name == "torch" else BatchedTorchAttention()
    if name == "triton":
        from pegainfer_core.ops.attention_triton import TritonAttention

        return TritonAttention(device)
    raise AssertionError(f"unresolved attention backend {name!r}")
