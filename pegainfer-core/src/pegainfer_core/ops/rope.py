"""Rotary position embedding: tables over positions, and the half-split rotation of queries and keys.

Owns the numbers of every rope type in `rope_config`, as transformers computes them. Positions come per token: rows of
one batch start anywhere. Tables are float32; cos and sin are rounded to the inputs' type before they are multiplied,
which makes bfloat16 logits equal to transformers' bit for bit.

Shape suffixes: C positions, T tokens, H query heads, K key/value heads, D head dim, N = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegainfer_core.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """float32 [N] on the CPU, and the factor that cos and sin are multiplied by (1 but for YaRN)."""
    exponents_N = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    wavelengths_N = config.theta**exponents_N  # in units of 2 pi
    frequencies_N = 1.0 / wavelengths_N
    scaling = config.scaling
    if scaling is None:
        return frequencies_N, 1.0
    if isinstance(scaling, LinearScaling):
        return frequencies_N / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies_N, scaling), 1.0
    interpolated_N = 1.0 / (scaling.factor * wavelengths_N)
    kept_N = 1 - _yarn_ramp(scaling, config.theta, head_dim)
    return interpolated_N * (1 - kept_N) + frequencies_N * kept_N, scaling.attention_scaling


def _llama3(frequencies_N: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and pass smoothly from one to the other between."""
    wavelengths_N = 2 * math.pi / frequencies_N
    context = scaling.original_max_position_embeddings
    longest, shortest = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    kept_N = (context / wavelengths_N - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth_N = (1 - kept_N) * frequencies_N / scaling.factor + kept_N * frequencies_N
    scaled_N = torch.where(wavelengths_N > longest, frequencies_N / scaling.factor, smooth_N)
    return torch.where(wavelengths_N < shortest, frequencies_N, scaled_N)


def _yarn_ramp(scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    """[N]: 0 where dimensions turn often and keep their frequency, 1 where they are divided by the factor."""
    low = _yarn_dimension(scaling.beta_fast, scaling, theta, head_dim)
    high = _yarn_dimension(scaling.beta_slow, scaling, theta, head_dim)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)


def _yarn_dimension(rotations: float, scaling: YarnScaling, theta: float, head_dim: int) -> float:
    """The (fractional) dimension that makes `rotations` turns over the original context."""
    turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(theta))


def apply_rope(
    q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_CN: Tensor, sin_CN: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' positions; pairs are (i, i + D / 2). Results have the inputs' types."""
    cos_T1N = cos_CN[positions_T].unsqueeze(1).to(q_THD.dtype)
    sin_T1N = sin_CN[positions_T].unsqueeze(1).to(q_THD.dtype)
    return _rotate(q_THD, cos_T1N, sin_T1N), _rotate(k_TKD, cos_T1N, sin_T1N)


def _rotate(x_THD: Tensor, cos_T1N: Tensor, sin_T1N: Tensor) -> Tensor:
    first_THN, second_THN = x_THD.chunk(2, dim=-1)
    return torch.cat((first_THN * cos_T1N - second_THN * sin_T1N, second_THN * cos_T1N + first_THN * sin_T1N), dim=-1)


class RotaryTable(nn.Module):
    """cos and sin of every position below `num_positions`: float32 [C, N], on `device` from the start."""

    cos_CN: Tensor
    sin_CN: Tensor

    def __init__(self, config: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        super().__init__()
        rotary_dim = config.rotary_dim(head_dim)
        frequencies_N, factor = inverse_frequencies(config, rotary_dim)
        positions_C = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles_CN = positions_C[:, None] * frequencies_N.to(device)
        still = (0, (head_dim - rotary_dim) // 2)  # what is not rotated keeps its values
        self.register_buffer("cos_CN", F.pad(angles_CN.cos() * factor, still, value=1.0), persistent=False)
        self.register_buffer("sin_CN", F.pad(angles_CN.sin() * factor, still), persistent=False)
        self._step: tuple[object, tuple[Tensor, Tensor]] | None = None

    def forward(self, q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """See `apply_rope`."""
        return apply_rope(q_THD, k_TKD, positions_T, self.cos_CN, self.sin_CN)

    def step_rows(self, positions_T: Tensor, dtype: torch.dtype, step: object) -> tuple[Tensor, Tensor]:
        """cos twice, and -sin and sin, [T, 1, D]: what `token_cpu` rotates with. The layers of a step share them.

        `step` is an object of this step alone: the same positions tensor may be filled again for the next one.
        """
        if self._step is None or self._step[0] is not step or self._step[1][0].dtype != dtype:
            cos_T1N = self.cos_CN[positions_T].unsqueeze(1).to(dtype)
            sin_T1N = self.sin_CN[positions_T].unsqueeze(1).to(dtype)
            rows = torch.cat((cos_T1N, cos_T1N), dim=-1), torch.cat((-sin_T1N, sin_T1N), dim=-1)
            self._step = step, rows
        return self._step[1]
