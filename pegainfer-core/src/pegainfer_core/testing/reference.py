"""Logits from transformers, the reference of families whose architecture it has.

Owns the load, checked both ways, and the comparison in log-probabilities. Imports transformers when it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def transformers_logits(path: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 logits [tokens, V] of each prompt from AutoModelForCausalLM on the CPU.

    Raises AssertionError if transformers found tensors missing or unexpected: it would go on with random weights.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    model, loading = loaded
    wrong = {key: value for key, value in loading.items() if value}
    assert not wrong, f"transformers did not load {path.name} cleanly: {wrong}"
    with torch.inference_mode():
        return [model.eval()(input_ids=torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


def mean_logprob_difference(logits_TV: Tensor, reference_TV: Tensor) -> float:
    """Mean absolute difference of log-probabilities, in nat, over all positions and the whole vocabulary."""
    found_TV, expected_TV = (values_TV.double().log_softmax(-1) for values_TV in (logits_TV, reference_TV))
    return float((found_TV - expected_TV).abs().mean())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopGap:
    """How far logits are from a reference where it matters, in nat."""

    mean: float
    """Mean absolute difference of log-probabilities over the 8 most likely tokens of each position."""
    p99: float
    """99th percentile of the same."""
    regret: float
    """The most that a greedy choice costs under the reference."""


def top_gap(logits_TV: Tensor, reference_TV: Tensor) -> TopGap:
    """Compare what a half-precision run would choose with a reference."""
    found_TV, expected_TV = (values_TV.double().log_softmax(-1) for values_TV in (logits_TV, reference_TV))
    top_T8 = found_TV.topk(8).indices
    differences = (found_TV.gather(-1, top_T8) - expected_TV.gather(-1, top_T8)).abs().flatten()
    chosen_T = expected_TV.gather(-1, found_TV.argmax(-1, keepdim=True))[:, 0]
    return TopGap(
        mean=float(differences.mean()),
        p99=float(differences.quantile(0.99)),
        regret=float((expected_TV.max(-1).values - chosen_T).max()),
    )
