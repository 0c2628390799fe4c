"""The Triton kernels of experts on CPU tensors, in Triton's interpreter (conftest.py turns it on), against the plain path."""

from __future__ import annotations

import pytest
import torch
from pegainfer_core.ops.moe import mix_experts
from pegainfer_core.ops.moe_triton import mix_experts as mix_experts_triton


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 6, 3), (2, 1, 1), (5, 8, 8), (40, 5, 2)])
@pytest.mark.parametrize(("hidden", "inter"), [(24, 16), (70, 40)])
def test_grouped_products_give_what_the_plain_path_gives(
    tokens: int, experts: int, chosen: int, hidden: int, inter: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x_TE = torch.randn(tokens, hidden, generator=generator)
    gate_up_X2FE = torch.randn(experts, 2 * inter, hidden, generator=generator) * hidden**-0.5
    down_XEF = torch.randn(experts, hidden, inter, generator=generator) * inter**-0.5
    # the first experts have most of the tokens, some have none
    scores_TX = torch.rand(tokens, experts, generator=generator) - torch.arange(experts) * 0.3
    ids_TK = scores_TX.topk(chosen).indices
    weights_TK = torch.rand(tokens, chosen, generator=generator)
    found_TE = mix_experts_triton(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)
    expected_TE = mix_experts(x_TE, gate_up_X2FE, down_XEF, ids_TK, weights_TK)
    torch.testing.assert_close(found_TE, expected_TE, rtol=1e-5, atol=1e-5)
