"""Gated DeltaNet: its two plain forms agree, steps may split a row anywhere, and the kernels give the same."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from pegainfer_core.ops import gdn_torch, gdn_triton
from pegainfer_core.ops.gdn import gated_delta_net
from pegainfer_core.ops.gdn_triton import ChunkTile
from pegainfer_core.testing.gated_delta_net import LayerCase, layer_case
from torch import Tensor

TILE = ChunkTile(chunk=16, values=16, scan_stages=1, dots="ieee", solve="ieee")
ROWS = [(1, 0), (1, 2), (1, 50), (2, 0), (3, 5), (35, 0), (17, 1), (5, 130)]
"""Decode rows that begin, that see less than the convolution's width, and that go on; prompts shorter and longer than it."""


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float) -> None:
    """Outputs and states agree relative to their size, and nothing else was written: NaN stays where it was."""
    for one, other in zip(found, expected, strict=True):
        unwritten = other.isnan()
        assert torch.equal(one.isnan(), unwritten)
        difference = (one.double() - other.double())[~unwritten].norm()
        assert float(difference / other.double()[~unwritten].norm()) < limit


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 200])
def test_chunked_is_recurrent(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k = (gdn_torch.unit(torch.randn(length, 3, 16, generator=generator)) for _ in range(2))
    v = torch.randn(length, 3, 8, generator=generator)
    g, beta = -3 * torch.rand(length, 3, generator=generator), torch.rand(length, 3, generator=generator)
    state = torch.randn(3, 16, 8, generator=generator)
    assert_close(gdn_torch.chunked(q, k, v, g, beta, state), gdn_torch.recurrent(q, k, v, g, beta, state), 1e-5)


def test_chunked_is_recurrent_for_a_token_that_repeats_for_ever() -> None:
    k = gdn_torch.unit(torch.ones(200, 1, 16))
    v, g, beta = torch.randn(200, 1, 8), torch.zeros(200, 1), torch.ones(200, 1)
    values = (k, k, v, g, beta, torch.zeros(1, 16, 8))
    assert_close(gdn_torch.chunked(*values), gdn_torch.recurrent(*values), 1e-5)


def split(case: LayerCase, at: int) -> list[LayerCase]:
    """A case of one row in two steps over the same states."""
    parts = []
    for tokens, fresh in ((slice(0, at), 1), (slice(at, None), 0)):
        length = len(case.positions_T[tokens])
        states = dataclasses.replace(
            case.states,
            fresh_R=torch.tensor([fresh], dtype=torch.int32),
            query_start_R1=torch.tensor([0, length], dtype=torch.int32),
            query_lens=[length],
            num_decode_rows=int(length == 1),
        )
        parts.append(
            LayerCase(
                projected_TP=case.projected_TP[tokens],
                weights=case.weights,
                states=states,
                positions_T=case.positions_T[tokens],
            )
        )
    return parts


def test_a_row_may_be_split_anywhere() -> None:
    case = layer_case([(70, 0)])
    whole = case.run(gated_delta_net)
    for at in range(1, 70):
        first, second = split(case, at)
        out, conv, state = first.run(gated_delta_net)
        states = dataclasses.replace(second.states, layers=[(conv, state)])
        rest = dataclasses.replace(second, states=states).run(gated_delta_net)
        # the convolution's latest inputs, and one that is not needed any more
        assert_close((torch.cat((out, rest[0])), *rest[1:]), whole, 1e-5)


def test_rows_of_a_step_are_as_alone() -> None:
    case = layer_case(ROWS)
    out_TX, conv_SWC, state_SHKV = case.run(gated_delta_net)
    starts = case.states.query_start_R1.tolist()
    for row, slot in enumerate(case.states.slots_R.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        states = dataclasses.replace(
            case.states,
            slots_R=case.states.slots_R[row : row + 1],
            fresh_R=case.states.fresh_R[row : row + 1],
            query_start_R1=torch.tensor([0, ROWS[row][0]], dtype=torch.int32),
            query_lens=[ROWS[row][0]],
            num_decode_rows=int(ROWS[row][0] == 1),
        )
        alone = LayerCase(
            projected_TP=case.projected_TP[tokens],
            weights=case.weights,
            states=states,
            positions_T=case.positions_T[tokens],
        ).run(gated_delta_net)
        expected = alone[0], alone[1][slot], alone[2][slot]
        assert_close((out_TX[tokens], conv_SWC[slot], state_SHKV[slot]), expected, 1e-5)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
def test_kernels_give_what_the_plain_layer_gives(dtype: torch.dtype, limit: float) -> None:
    case = layer_case(ROWS, heads=2, key_heads=1, value_dim=32).to(dtype, "cpu")
    kernels = functools.partial(gdn_triton.gated_delta_net, tile=TILE)
    assert_close(case.run(kernels), case.run(gdn_torch.gated_delta_net), limit)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # in what nobody wrote
def test_kernels_in_a_shape_that_many_steps_share() -> None:
    """Captured: the host knows bounds only; padding rows share the last slot, padding tokens follow the last row."""
    rows = [(1, 5), (3, 0), (20, 7)]
    case = layer_case(rows, heads=2, key_heads=1)
    expected = case.run(gdn_torch.gated_delta_net)
    last = case.states.layers[0][0].shape[0] - 1
    slots = [case.states.slots_R[0], last, *case.states.slots_R[1:], last, last]
    tokens = torch.tensor([0, 0, *range(1, 24), *[0] * 9])
    padded = LayerCase(
        projected_TP=case.projected_TP[tokens],
        weights=case.weights,
        states=dataclasses.replace(
            case.states,
            slots_R=torch.tensor(slots),
            fresh_R=torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.int32),
            query_start_R1=torch.tensor([0, 1, 2, 5, 25, 25, 25], dtype=torch.int32),
            query_lens=[1, 1, *[32] * 4],
            num_decode_rows=2,
        ),
        positions_T=torch.cat((torch.tensor([5, 0]), case.positions_T[1:], torch.zeros(9, dtype=torch.int64))),
    )
    out_TX, conv_SWC, state_SHKV = padded.run(functools.partial(gdn_triton.gated_delta_net, tile=TILE))
    found = out_TX[[0, *range(2, 25)]], conv_SWC[:last], state_SHKV[:last]
    assert_close(found, (expected[0], expected[1][:last], expected[2][:last]), 1e-5)
