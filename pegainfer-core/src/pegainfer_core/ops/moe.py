"""Mixtures of experts: which experts a token goes to, and their sum.

Owns the plain torch path, the choice of the Triton one, and the modules that hold a router and the experts' stacked weights. Knows no
family: what differs between routers is a `RoutingRule`.

Shape suffixes: T tokens, X experts, G groups, K experts of one token, E hidden size, F an expert's intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.dispatch import use_triton
from pegainfer_core.routing import RoutingRule

SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by."""


def route(logits_TX: Tensor, rule: RoutingRule, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids (int64) and float32 weights [T, K] of each token's experts, the best choice first. Logits and bias are float32."""
    scores_TX = logits_TX.softmax(-1) if rule.scoring == "softmax" else logits_TX.sigmoid()
    choice_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if rule.num_groups > 1:
        choice_TGX = choice_TX.view(len(choice_TX), rule.num_groups, -1)
        worth_TG = choice_TGX.topk(2 if rule.group_score == "best two" else 1).values.sum(-1)
        closed_TG = torch.ones_like(worth_TG, dtype=torch.bool)
        closed_TG.scatter_(1, _best(worth_TG, rule.num_chosen_groups), False)
        choice_TX = choice_TGX.masked_fill(closed_TG.unsqueeze(-1), -torch.inf).flatten(-2)
    ids_TK = _best(choice_TX, rule.num_chosen)
    weights_TK = scores_TX.gather(1, ids_TK)
    if rule.normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
    return ids_TK, weights_TK * rule.scale


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row, equal ones in order: `topk` promises no order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def mix_experts(x_TE: Tensor, gate_up_X2FE: Tensor, down_XEF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum [T, E] of each token's experts, each silu(gate) * up and then down, added in float32."""
    if use_triton(x_TE):
        from pegainfer_core.ops import moe_triton

        return moe_triton.mix_experts(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)
    if x_TE.device.type == "cpu":
        return mix_chosen(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)
    return mix_all(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)


def mix_chosen(x_TE: Tensor, gate_up_X2FE: Tensor, down_XEF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Expert by expert, those that some token goes to: the host reads ids, which costs a CPU nothing."""
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(down_XEF)).tolist()
    out_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        places = order[start : start + count]
        start += count
        tokens = places // ids_TK.shape[1]
        found_NE = _expert(x_TE[tokens], gate_up_X2FE[expert], down_XEF[expert])
        out_TE.index_add_(0, tokens, found_NE.float() * weights_TK.flatten()[places, None])
    return out_TE.to(x_TE.dtype)


def mix_all(x_TE: Tensor, gate_up_X2FE: Tensor, down_XEF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Every expert for every token: many times the work, but nothing depends on values, so that it can be captured."""
    weights_TX = torch.zeros(len(x_TE), len(down_XEF), dtype=torch.float32, device=x_TE.device)
    weights_TX.scatter_(1, ids_TK, weights_TK)
    out_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
    for expert, (gate_up_2FE, down_EF) in enumerate(zip(gate_up_X2FE, down_XEF, strict=True)):
        out_TE += _expert(x_TE, gate_up_2FE, down_EF).float() * weights_TX[:, expert, None]
    return out_TE.to(x_TE.dtype)


def _expert(x_NE: Tensor, gate_up_2FE: Tensor, down_EF: Tensor) -> Tensor:
    return F.linear(silu_mul(F.linear(x_NE, gate_up_2FE)), down_EF)


class Router(nn.Module):
    """A float32 weight [X, E] and, where the family has one, a float32 bias [X] that only choices see."""

    bias_X: nn.Parameter | None

    def __init__(self, hidden_size: int, rule: RoutingRule, *, bias: bool = False) -> None:
        super().__init__()
        assert rule.problem() is None, rule.problem()
        self.rule = rule
        self.weight = _empty(rule.num_experts, hidden_size, dtype=torch.float32)
        self.register_parameter("bias_X", _empty(rule.num_experts, dtype=torch.float32) if bias else None)

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `route`."""
        return route(F.linear(x_TE.float(), self.weight), self.rule, self.bias_X)


class Experts(nn.Module):
    """Weights of all experts, one below the other: gate rows and up rows of the first, of the second, ...; and down rows alike."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = _empty(num_experts * 2 * intermediate_size, hidden_size, dtype=dtype)
        self.down = _empty(num_experts * hidden_size, intermediate_size, dtype=dtype)

    def forward(self, x_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """See `mix_experts`."""
        gate_up_X2FE = self.gate_up.view(self.num_experts, -1, self.gate_up.shape[1])
        down_XEF = self.down.view(self.num_experts, -1, self.down.shape[1])
        return mix_experts(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
