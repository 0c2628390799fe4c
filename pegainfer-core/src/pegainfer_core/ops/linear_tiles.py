"""Which kernel and tile multiply a few tokens by a weight, or that cuBLAS does it better: a table of what was measured.

Owns the rule for every shape; launches nothing and needs no Triton. Measured on one H200 only, with Qwen3-4B's weights in
bfloat16: benchmarks/results/2026-12-01-h200-linear-apart.json (launches
do not overlap; entries for 4 tokens: 2026-12-01-h200-linear.json); other GPUs take the same. A weight near a measured one in both
dimensions takes its tiles. Any other takes, for one token, the tile that was within 4% of the best for every weight, and
cuBLAS from two tokens on: which tile beats it there differs from weight to weight.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """How one launch cuts its work."""

    features: int
    """BLOCK_N: output features of a program."""
    depth: int
    """BLOCK_K: input features of one turn of the loop."""
    warps: int
    stages: int
    """Depth of the software pipeline; 1 has none."""
    matrix_units: bool = False
    weight_first: bool = False
    """On the matrix units: the weight is the left operand."""


def _rows(features: int, depth: int, warps: int, stages: int) -> LinearTile:
    return LinearTile(features=features, depth=depth, warps=warps, stages=stages)


def _tokens_first(features: int, depth: int, warps: int, stages: int) -> LinearTile:
    return dataclasses.replace(_rows(features, depth, warps, stages), matrix_units=True)


def _weight_first(features: int, depth: int, warps: int, stages: int) -> LinearTile:
    return dataclasses.replace(_tokens_first(features, depth, warps, stages), weight_first=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The fastest for weights of one kind, for 2-byte types. Microseconds in comments: ours against cuBLAS's."""

    gated: bool = False
    features: range
    """Output features for which it is taken; of a gated weight half its rows."""
    depth: range
    tiles: dict[int, LinearTile | None]
    """By the largest number of tokens for which each is taken, rising; None and beyond the last: cuBLAS."""


_MEASURED = (
    _Measured(  # 6144 x 2560: stacked queries, keys and values
        features=range(4096, 10241),
        depth=range(2048, 4097),
        tiles={
            1: _rows(4, 512, 1, 3),  # 9.9, 12.7
            2: _rows(4, 256, 1, 1),  # 11.6, 13.2
            8: None,  # 13.4 at best, 12.8
            16: _weight_first(64, 256, 4, 5),  # 12.1, 13.0
        },
    ),
    _Measured(  # 2560 x 4096: attention's output
        features=range(2048, 4096),
        depth=range(2048, 6145),
        tiles={
            1: _rows(2, 1024, 4, 1),  # 7.3, 9.7
            2: _rows(2, 512, 2, 1),  # 8.6, 9.7
            4: _tokens_first(16, 512, 2, 3),  # 8.7, 9.7
            8: _weight_first(32, 256, 2, 5),  # 9.0, 10.0
            16: _tokens_first(16, 256, 2, 5),  # 9.4, 10.0
        },
    ),
    _Measured(  # 2 x 9728 x 2560: gate and up
        gated=True,
        features=range(6144, 16385),
        depth=range(2048, 4097),
        tiles={
            1: _rows(2, 512, 2, 1),  # 27.1, 34.0
            8: _weight_first(16, 128, 1, 3),  # 27.9, 34.6
            16: _tokens_first(32, 128, 4, 3),  # 29.9, 35.0
        },
    ),
    _Measured(  # 2560 x 9728: down
        features=range(2048, 4096),
        depth=range(6145, 16385),
        tiles={
            1: _rows(2, 1024, 4, 1),  # 14.3, 17.4
            2: _rows(2, 512, 2, 1),  # 16.8, 17.3
            4: _tokens_first(16, 512, 2, 3),  # 17.1, 17.4
            8: _weight_first(32, 256, 2, 5),  # 17.1, 18.0
            16: _tokens_first(16, 256, 2, 5),  # 18.3, 18.0
        },
    ),
    _Measured(  # 151936 x 2560: the vocabulary
        features=range(65536, 524289),
        depth=range(1024, 8193),
        tiles={
            1: _rows(2, 512, 2, 1),  # 173, 188
            8: _weight_first(16, 512, 1, 3),  # 180, 191
            16: _weight_first(64, 256, 4, 5),  # 184, 192
            32: _weight_first(64, 128, 4, 3),  # 190, 195
        },
    ),
)

_ONE_TOKEN = _rows(4, 512, 1, 3)
"""Of any other weight."""

_ONE_TOKEN_FLOAT32 = LinearTile(features=4, depth=256, warps=2, stages=1)


def shared_bytes(tile: LinearTile, tokens: int, dtype: torch.dtype, gated: bool) -> int:
    """At most so much shared memory is needed: the pipeline's stages of the weight and of the tokens."""
    return (tile.features * (1 + gated) + max(16, tokens)) * tile.depth * dtype.itemsize * tile.stages


def choose_tile(tokens: int, features: int, depth: int, dtype: torch.dtype, gated: bool) -> LinearTile | None:
    """The tile for `tokens` tokens and a weight [features, depth] (`gated`: two of them), or None: cuBLAS is faster."""
    if dtype == torch.float32:
        return _ONE_TOKEN_FLOAT32 if tokens == 1 else None
    for kind in _MEASURED:
        if kind.gated == gated and features in kind.features and depth in kind.depth:
            return next((tile for most, tile in kind.tiles.items() if tokens <= most), None)
    return _ONE_TOKEN if tokens == 1 else None
