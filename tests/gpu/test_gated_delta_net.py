"""The kernels of gated DeltaNet on a GPU against the plain layer in float32, at the widths of Qwen3.5-4B and up to 32k tokens; capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pegainfer_core.ops import gdn_torch, gdn_triton
from pegainfer_core.testing.gated_delta_net import LayerCase, layer_case
from torch import Tensor

pytestmark = pytest.mark.gpu

# relative to the norm of the reference: a handful of roundings of the type
LIMITS = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 2e-4}
STATE_LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-4}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)
WIDTHS = {"heads": 32, "key_heads": 16, "key_dim": 128, "value_dim": 128}
MIXED = [(1, 0), (1, 2), (1, 900), (2, 0), (3, 77), (64, 0), (65, 5), (700, 300)]


def rounded(case: LayerCase, dtype: torch.dtype) -> tuple[LayerCase, LayerCase]:
    """(on the GPU in `dtype`, the same values in float32)."""
    narrow = case.to(dtype, "cuda")
    return narrow, narrow.to(torch.float32, "cuda")


def error(found: Tensor, expected: Tensor) -> float:
    unwritten = expected.isnan()
    assert torch.equal(found.isnan(), unwritten)
    difference = (found.double() - expected.double())[~unwritten]
    return float(difference.norm() / expected.double()[~unwritten].norm())


def assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Outputs and states; the convolution's inputs are copies."""
    assert error(found[0], expected[0]) < LIMITS[dtype]
    assert error(found[1], expected[1]) == 0.0
    assert error(found[2], expected[2]) < STATE_LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("heads", [16, 32, 48])
def test_rows_of_all_kinds(heads: int, dtype: torch.dtype) -> None:
    case, reference = rounded(layer_case(MIXED, **(WIDTHS | {"heads": heads})), dtype)
    assert_near(case.run(gdn_triton.gated_delta_net), reference.run(gdn_torch.gated_delta_net), dtype)


@DTYPES
@pytest.mark.parametrize("length", [4096, 32768])
def test_long_prompts(length: int, dtype: torch.dtype) -> None:
    case, reference = rounded(layer_case([(length, 0)], **WIDTHS), dtype)
    assert_near(case.run(gdn_triton.gated_delta_net), reference.run(gdn_torch.gated_delta_net), dtype)


@DTYPES
def test_token_by_token_after_a_prompt(dtype: torch.dtype) -> None:
    """Two hundred decode steps go where one prompt of that length goes: the state is handed over without loss."""
    steps = 200
    case, reference = rounded(layer_case([(steps, 0)], **WIDTHS), dtype)
    expected = reference.run(gdn_torch.gated_delta_net)
    layers = [tuple(tensor.clone() for tensor in case.states.layers[0])]
    outputs: list[Tensor] = []
    for position in range(steps):
        states = dataclasses.replace(
            case.states,
            layers=layers,
            fresh_R=torch.tensor([int(position == 0)], dtype=torch.int32, device="cuda"),
            query_start_R1=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            query_lens=[1],
            num_decode_rows=1,
        )
        token = slice(position, position + 1)
        given = (case.projected_TP[token], case.weights, states, 0, case.positions_T[token])
        outputs.append(gdn_triton.gated_delta_net(*given))
    assert_near((torch.cat(outputs), *layers[0]), expected, dtype)


def test_captured_launches_serve_other_lengths() -> None:
    """One capture of a padded shape, replayed for steps with other rows."""
    dtype = torch.bfloat16
    first, _ = rounded(layer_case([(1, 0), (1, 9), (200, 0), (100, 30), (30, 0)], **WIDTHS), dtype)
    second, reference = rounded(layer_case([(1, 5), (1, 0), (20, 0), (300, 3), (10, 64)], seed=1, **WIDTHS), dtype)
    layers = [tuple(tensor.clone() for tensor in first.states.layers[0])]
    states = dataclasses.replace(first.states, layers=layers, query_lens=[1, 1, 330, 330, 330])

    def run() -> Tensor:
        return gdn_triton.gated_delta_net(first.projected_TP, first.weights, states, 0, first.positions_T)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TX = run()
    for mine, theirs in (
        (first.projected_TP, second.projected_TP),
        (first.positions_T, second.positions_T),
        (states.slots_R, second.states.slots_R),
        (states.fresh_R, second.states.fresh_R),
        (states.query_start_R1, second.states.query_start_R1),
        *zip(layers[0], second.states.layers[0], strict=True),
        *zip(first.weights.parameters(), second.weights.parameters(), strict=True),
    ):
        mine.data.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()
    assert_near((out_TX, *layers[0]), reference.run(gdn_torch.gated_delta_net), dtype)
