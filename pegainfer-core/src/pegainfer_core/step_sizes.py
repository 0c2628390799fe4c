"""The sizes that captured steps are padded to, and how many prompt tokens a step takes beside decode rows.

Owns both because they go together: a chunk that is a little longer than a size is padded to the next one. No torch, no requests. Figures
behind the numbers: benchmarks/results/2026-12-01-h200-mixed-steps.json.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

DECODE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
MIXED_DECODE_ROWS = (0, 8, 32, 64, 128, 256, 512)
"""Coarser beside prompts, whose tokens dominate the step."""
MIXED_TOKENS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1536, 2048, 3072, 4096, 6144, 8192)
"""Totals of a step with prompts: multiples of 128, the height of a matrix tile, so that none is nearly empty; below, what a cached prompt
leaves to compute."""

RIDING_TOKENS = 256
"""Up to about here a step's time is that of reading the weights, so a prompt's tokens ride along for little."""
RIDING_TOKENS_PER_ROW = 8
"""More rows make a longer step anyway, and end more often: a chunk of this size for each leaves few prompts waiting."""
BACKLOG_STEPS = 64
"""Prompt tokens that wait are spread over so many steps, if that makes longer chunks. benchmarks/chunk_policy.py compares values."""


def sizes_up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes below `most`, and `most`."""
    return [size for size in sizes if size < most] + [most]


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """The first of the ascending `sizes` that is not below `wanted`, or the last one."""
    return sizes[min(bisect.bisect_left(sizes, wanted), len(sizes) - 1)]


def prompt_tokens_beside(decode_rows: int, backlog: int, most: int) -> int:
    """Prompt tokens of a step, at least 1 and at most `most`, when `backlog` of them wait.

    Without decode rows nobody is kept waiting by a long step. With them a chunk is short, so that streams go on, unless prompts pile up;
    it fills a padded size exactly.
    """
    if not decode_rows:
        return most
    tokens = max(RIDING_TOKENS + RIDING_TOKENS_PER_ROW * decode_rows, decode_rows + backlog // BACKLOG_STEPS)
    padded_rows = at_least(MIXED_DECODE_ROWS, decode_rows)
    return max(1, min(at_least(MIXED_TOKENS, tokens) - padded_rows, most))
