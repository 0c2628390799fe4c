"""Gated DeltaNet: a short causal convolution, and a recurrent state for each value head in place of keys and values.

Owns the layer's own parameters and the choice between the kernels and the plain implementation. Knows no family. For
each value head, with q and k of length 1 and q scaled by K ** -0.5:

    S <- exp(g) S;   S <- S + k (x) beta (v - S^T k);   o = S^T q;   g = -exp(A) softplus(a + bias), beta = sigmoid(b)

Invariant: what a row leaves in its slot depends on its tokens alone, not on how steps split them. The recurrent state is
float32 throughout.

Shape suffixes: T tokens, R rows, S slots, H value heads, G key heads, K key dim, V value dim, C = 2 G K + H V channels
(queries, keys, values), W taps of the convolution, P = C + H V + 2 H outputs of the stacked projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pegainfer_core.ops.dispatch import use_triton
from pegainfer_core.ops.states import States

L2_EPS = 1e-6
"""Added to the squared length of a query or key before it is divided by its length."""


class GatedDeltaNetWeights(nn.Module):
    """Parameters of a layer beside its projections, on the meta device."""

    def __init__(
        self, channels: int, taps: int, value_heads: int, value_dim: int, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        """Of the norm."""
        self.conv_C1W = _parameter((channels, 1, taps), dtype)
        self.A_log_H = _parameter((value_heads,), torch.float32)
        self.dt_bias_H = _parameter((value_heads,), torch.float32)
        self.norm_V = _parameter((value_dim,), torch.float32)


def gated_delta_net(
    projected_TP: Tensor, weights: GatedDeltaNetWeights, states: States, layer: int, positions_T: Tensor
) -> Tensor:
    """The layer between its projections: outputs [T, H * V] in projected's type.

    `projected_TP` holds q, k, v (before the convolution), z, b and a, side by side. The layer's state is two tensors,
    updated in place: the latest W inputs of the convolution [S, W, C], that of position p at p modulo W, and the recurrent
    state [S, H, K, V] in float32.
    """
    assert states.layers[layer][1].dtype == torch.float32, "the state is never narrowed"
    if use_triton(projected_TP) or (projected_TP.is_cuda and not lengths_are_exact(states, len(positions_T))):
        from pegainfer_core.ops import gdn_triton

        return gdn_triton.gated_delta_net(projected_TP, weights, states, layer, positions_T)
    from pegainfer_core.ops import gdn_torch

    return gdn_torch.gated_delta_net(projected_TP, weights, states, layer, positions_T)


def lengths_are_exact(states: States, num_tokens: int) -> bool:
    """Whether the host knows every row's length: not in a captured step, whose lengths are bounds."""
    return sum(states.query_lens) == num_tokens


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
