"""Logits from transformers, the reference of families whose architecture it has.

Owns the load, checked both ways, and the comparison in log-probabilities. Imports transformers when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def transformers_logits(path: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 logits [tokens, V] of each prompt from AutoModelForCausalLM on the CPU.

    Raises AssertionError if transformers found tensors missing or unexpected: it would go on with random weights.
    """
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in loading.items() if value}
    assert not wrong, f"transformers did not load {path.name} cleanly: {wrong}"
    with torch.inference_mode():
        return [model.eval()(input_ids=torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


def mean_logprob_difference(logits_TV: Tensor, reference_TV: Tensor) -> float:
    """Mean absolute difference of log-probabilities, in nat, over all positions and the whole vocabulary."""
    found_TV, expected_TV = (values_TV.double().log_softmax(-1) for values_TV in (logits_TV, reference_TV))
    return float((found_TV - expected_TV).abs().mean())
