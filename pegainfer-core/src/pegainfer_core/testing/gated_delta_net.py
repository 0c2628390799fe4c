"""Random inputs of one gated DeltaNet layer: rows of any length that go on from states in scattered slots.

Owns what the tests of the plain layer, of the kernels in the interpreter, and of the kernels on a GPU share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pegainfer_core.ops.gdn import GatedDeltaNetWeights
from pegainfer_core.ops.states import States

Layer = Callable[[Tensor, GatedDeltaNetWeights, States, int, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """Inputs of `gdn.gated_delta_net`. Slots that no row has, and those of rows that begin, hold NaN."""

    projected_TP: Tensor
    weights: GatedDeltaNetWeights
    states: States
    positions_T: Tensor

    def run(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, convolution inputs kept, recurrent states) of a run on copies of the states."""
        conv_SWC, state_SHKV = (tensor.clone() for tensor in self.states.layers[0])
        states = dataclasses.replace(self.states, layers=[(conv_SWC, state_SHKV)])
        return layer(self.projected_TP, self.weights, states, 0, self.positions_T), conv_SWC, state_SHKV

    def to(self, dtype: torch.dtype, device: str) -> LayerCase:
        """The same values, rounded to `dtype` where they are not float32 in every model."""
        conv_SWC, state_SHKV = self.states.layers[0]
        weights = GatedDeltaNetWeights(1, 1, 1, 1, self.weights.eps, dtype)
        for name, value in self.weights.named_parameters():
            kind = dtype if name == "conv_C1W" else torch.float32
            weights.register_parameter(name, nn.Parameter(value.to(device, kind), requires_grad=False))
        return LayerCase(
            projected_TP=self.projected_TP.to(device, dtype),
            weights=weights,
            states=dataclasses.replace(
                self.states,
                layers=[(conv_SWC.to(device, dtype), state_SHKV.to(device))],
                slots_R=self.states.slots_R.to(device),
                fresh_R=self.states.fresh_R.to(device),
                query_start_R1=self.states.query_start_R1.to(device),
            ),
            positions_T=self.positions_T.to(device),
        )


def layer_case(
    rows: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    key_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    taps: int = 4,
    seed: int = 0,
) -> LayerCase:
    """`rows` are (new tokens, tokens before), rows of one token first. float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lens = [length for length, _ in rows]
    channels = 2 * key_heads * key_dim + heads * value_dim
    slots_R = torch.randperm(len(rows) + 3, generator=generator)[: len(rows)]
    conv_SWC = torch.full((len(rows) + 4, taps, channels), torch.nan)
    state_SHKV = torch.full((len(rows) + 4, heads, key_dim, value_dim), torch.nan)
    for slot, (_, before) in zip(slots_R.tolist(), rows, strict=True):
        if before:
            seen = [position % taps for position in range(max(before - taps, 0), before)]
            conv_SWC[slot, seen] = normal(len(seen), channels)
            state_SHKV[slot] = 0.3 * normal(heads, key_dim, value_dim)
    num_decode_rows = next((row for row, length in enumerate(lens) if length != 1), len(lens))
    return LayerCase(
        projected_TP=normal(sum(lens), channels + heads * value_dim + 2 * heads),
        weights=_weights(normal, channels, taps, heads, value_dim),
        states=States(
            layers=[(conv_SWC, state_SHKV)],
            slots_R=slots_R,
            fresh_R=torch.tensor([int(before == 0) for _, before in rows], dtype=torch.int32),
            query_start_R1=torch.tensor([0, *lens]).cumsum(0).int(),
            query_lens=lens,
            num_decode_rows=num_decode_rows,
        ),
        positions_T=torch.cat([torch.arange(before, before + length) for length, before in rows]),
    )


def _weights(
    normal: Callable[..., Tensor], channels: int, taps: int, heads: int, value_dim: int
) -> GatedDeltaNetWeights:
    weights = GatedDeltaNetWeights(channels, taps, heads, value_dim, 1e-6, torch.float32)
    values = {
        "conv_C1W": 0.5 * normal(channels, 1, taps),
        # from heads that forget at once to heads that keep for hundreds of tokens
        "A_log_H": torch.linspace(-4.0, 1.5, heads) + 0.1 * normal(heads),
        "dt_bias_H": normal(heads),
        "norm_V": 1 + 0.1 * normal(value_dim),
    }
    for name, value in values.items():
        weights.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return weights
