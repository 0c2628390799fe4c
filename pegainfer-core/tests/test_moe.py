"""Mixtures of experts: routers against one in plain Python, for any numbers; experts against each token's own sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegainfer_core.ops.moe import Experts, Router, mix_all, mix_chosen, mix_experts, route
from pegainfer_core.routing import RoutingRule
from torch import Tensor, nn


def plain_route(logits: list[float], bias: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """One token's experts and weights, as one would explain them."""
    if rule.scoring == "softmax":
        top = max(logits)
        total = sum(math.exp(value - top) for value in logits)
        scores = [math.exp(value - top) / total for value in logits]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = rule.num_experts // rule.num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(rule.num_groups)]
    worth = [
        sum(sorted((choice[x] for x in group), reverse=True)[: 1 if rule.group_score == "best" else 2])
        for group in groups
    ]
    open_groups = sorted(range(rule.num_groups), key=lambda group: (-worth[group], group))[: rule.num_chosen_groups]
    candidates = sorted(x for group in open_groups for x in groups[group])
    ids = sorted(candidates, key=lambda x: (-choice[x], x))[: rule.num_chosen]
    weights = [scores[x] for x in ids]
    if rule.normalised:
        weights = [weight / (sum(scores[x] for x in ids) + 1e-20) for weight in weights]
    return ids, [weight * rule.scale for weight in weights]


@st.composite
def routings(draw: st.DrawFn) -> tuple[RoutingRule, list[float], list[float]]:
    """A rule, logits and a bias. Few distinct values, so that equal ones are common; biases are mostly negative."""
    groups = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.integers(2, 4))
    chosen_groups = draw(st.integers(1, groups))
    rule = RoutingRule(
        num_experts=groups * size,
        num_chosen=draw(st.integers(1, chosen_groups * size)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        group_score=draw(st.sampled_from(["best", "best two"])),
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5, 16.0])),
    )
    count = rule.num_experts
    logits = draw(st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=count, max_size=count))
    bias = draw(st.lists(st.sampled_from([-9.0, -2.0, -2.0, 0.0, 0.25]), min_size=count, max_size=count))
    return rule, logits, bias


@given(routings(), st.booleans())
def test_any_router_chooses_as_the_plain_one(
    routing: tuple[RoutingRule, list[float], list[float]], biased: bool
) -> None:
    rule, logits, bias = routing
    bias = bias if biased else [0.0] * rule.num_experts
    ids, weights = plain_route(logits, bias, rule)
    others = [-value for value in logits]  # a row beside it, which must not matter
    ids_TK, weights_TK = route(torch.tensor([others, logits]), rule, torch.tensor(bias) if biased else None)
    assert ids_TK[1].tolist() == ids
    assert weights_TK[1].tolist() == pytest.approx(weights, rel=1e-5)
    assert len(set(ids)) == rule.num_chosen


def test_masked_groups_stay_closed_where_every_open_choice_is_negative() -> None:
    rule = RoutingRule(
        num_experts=4, num_chosen=2, scoring="sigmoid", num_groups=2, num_chosen_groups=1, group_score="best two"
    )
    bias_X = torch.tensor([-5.0, -5.0, -4.0, -9.0])
    ids_TK, weights_TK = route(torch.zeros(1, 4), rule, bias_X)
    assert ids_TK.tolist() == [[0, 1]], "the second group's best is the best of all, its two are not"
    assert weights_TK.tolist() == [[0.5, 0.5]], "weights do not see the bias"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_groups": 3}, "8 experts cannot be divided into 3 groups"),
        ({"num_groups": 2, "num_chosen_groups": 3}, "3 groups cannot be chosen of 2"),
        ({"num_groups": 4, "num_chosen": 3}, "3 experts cannot be chosen of 2"),
        ({"num_chosen": 9}, "9 experts cannot be chosen of 8"),
        ({"num_groups": 8, "num_chosen": 1, "group_score": "best two"}, "a group of one expert has no best two"),
        ({}, None),
    ],
)
def test_rules_that_nothing_can_follow(changes: dict[str, Any], problem: str | None) -> None:
    rule = RoutingRule(num_experts=8, num_chosen=2, scoring="softmax")
    assert dataclasses.replace(rule, **changes).problem() == problem


def experts_of(x_TE: Tensor, gate_up_X2FE: Tensor, down_XEF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Token by token and expert by expert, in float64."""
    out = torch.zeros_like(x_TE, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up_X2FE[expert].double() @ x_TE[token].double()).chunk(2)
            out[token] += weight * (down_XEF[expert].double() @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("mix", [mix_experts, mix_chosen, mix_all])
def test_experts_give_the_weighted_sum(tokens: int, mix: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(tokens)
    experts, chosen, hidden, inter = 6, 3, 24, 16
    x_TE = torch.randn(tokens, hidden, generator=generator)
    gate_up_X2FE = torch.randn(experts, 2 * inter, hidden, generator=generator)
    down_XEF = torch.randn(experts, hidden, inter, generator=generator)
    # the last expert gets no token
    ids_TK = torch.stack([torch.randperm(experts - 1, generator=generator)[:chosen] for _ in range(tokens)])
    weights_TK = torch.rand(tokens, chosen, generator=generator)
    found = mix(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)
    torch.testing.assert_close(
        found.double(), experts_of(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK), rtol=1e-4, atol=1e-4
    )


def test_modules_hold_experts_one_below_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    rule = RoutingRule(num_experts=4, num_chosen=2, scoring="sigmoid", normalised=True)
    router, experts = Router(8, rule, bias=True), Experts(4, 8, 6, torch.float32)
    for module in (router, experts):
        for name, parameter in list(module.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator)
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    assert router.weight.dtype == torch.float32
    x_TE = torch.randn(5, 8, generator=generator)
    ids_TK, weights_TK = router(x_TE)
    assert router.bias_X is not None
    for token, logits in enumerate((x_TE @ router.weight.T).tolist()):
        ids, weights = plain_route(logits, router.bias_X.tolist(), rule)
        assert ids_TK[token].tolist() == ids
        assert weights_TK[token].tolist() == pytest.approx(weights, rel=1e-4)
    found = experts(x_TE, ids_TK, weights_TK)
    torch.testing.assert_close(
        found.double(),
        experts_of(x_TE, experts.gate_up.view(4, 12, 8), experts.down.view(4, 8, 6), ids_TK, weights_TK),
        rtol=1e-4,
        atol=1e-4,
    )
