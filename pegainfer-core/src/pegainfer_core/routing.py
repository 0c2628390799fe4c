"""How a mixture of experts chooses: the rule of a router as data, so that families differ in numbers and not in code.

Owns the rule alone. The operations are in `ops.moe`; families put a rule into their config. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["best", "best two"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """From a token's router logits to its experts and their weights.

    Logits become scores in float32. Choices go by score plus bias, where a router has a bias; weights are the chosen scores without it.
    Equal choices go to the lowest id. Where experts come in groups, only those of the best groups can be chosen, whatever their sign.
    """

    num_experts: int
    num_chosen: int
    """Experts of one token."""
    scoring: Scoring
    num_groups: int = 1
    """Equal runs of neighbouring experts."""
    num_chosen_groups: int = 1
    group_score: GroupScore = "best"
    """What a group is worth: its best choice, or the sum of its best two."""
    normalised: bool = False
    """Weights are divided by their sum."""
    scale: float = 1.0
    """Weights are multiplied by this in the end."""

    def problem(self) -> str | None:
        """Why no router can follow this rule, in words, or None."""
        if self.num_experts % self.num_groups:
            return f"{self.num_experts} experts cannot be divided into {self.num_groups} groups"
        if self.num_chosen_groups > self.num_groups:
            return f"{self.num_chosen_groups} groups cannot be chosen of {self.num_groups}"
        size = self.num_experts // self.num_groups
        if self.num_chosen > self.num_chosen_groups * size:
            return f"{self.num_chosen} experts cannot be chosen of {self.num_chosen_groups * size}"
        if self.num_groups > 1 and self.group_score == "best two" and size < 2:
            return "a group of one expert has no best two"
        return None
