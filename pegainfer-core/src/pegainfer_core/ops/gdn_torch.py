"""Gated DeltaNet with torch alone: the CPU path, and the oracle of the kernels.

Owns two forms of the gated delta rule that agree, token by token and in chunks, and the plain layer around them. See
ops/gdn.py for the rule.

Shape suffixes: as in ops/gdn.py; and D decode rows, L tokens of one row, N chunks, B tokens of a chunk; X any leading
dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pegainfer_core.ops.gdn import L2_EPS, GatedDeltaNetWeights, lengths_are_exact
from pegainfer_core.ops.states import States

CHUNK = 64


def gated_delta_net(
    projected_TP: Tensor, weights: GatedDeltaNetWeights, states: States, layer: int, positions_T: Tensor
) -> Tensor:
    """See gdn.gated_delta_net."""
    assert lengths_are_exact(states, len(positions_T)), "the plain layer needs the rows' lengths on the host"
    conv_SWC, state_SHKV = states.layers[layer]
    _, heads, key_dim, value_dim = state_SHKV.shape
    mixed_TC, z_TX, b_TH, a_TH = torch.split(projected_TP, [conv_SWC.shape[2], heads * value_dim, heads, heads], dim=-1)
    g_TH, beta_TH = gates(a_TH, b_TH, weights.A_log_H, weights.dt_bias_H)
    outputs: list[Tensor] = []
    start = 0
    for rows, length in _parts(states):
        tokens = slice(start, start + length)
        start += length
        fresh_R111 = states.fresh_R[rows].bool()[:, None, None, None]
        slots_R, positions = states.slots_R[rows], positions_T[tokens]
        state_RHKV = state_SHKV.index_select(0, slots_R).masked_fill(fresh_R111, 0.0)
        conv = _row_convolution if rows.start >= states.num_decode_rows else _step_convolution
        mixed = conv(mixed_TC[tokens], weights.conv_C1W, conv_SWC, slots_R, positions)
        values = (*heads_of(mixed, heads, key_dim, value_dim), g_TH[tokens], beta_TH[tokens])
        if rows.start >= states.num_decode_rows:
            out_THV, state_HKV = chunked(*values, state_RHKV[0])
            state_RHKV = state_HKV[None]
        else:
            out_THV, state_RHKV = step(*values, state_RHKV)
        state_SHKV.index_copy_(0, slots_R, state_RHKV)
        outputs.append(out_THV.to(mixed_TC.dtype))
    out_THV = torch.cat(outputs)
    return gated_norm(out_THV, z_TX.view_as(out_THV), weights.norm_V, weights.eps).flatten(1)


def _parts(states: States) -> Iterator[tuple[slice, int]]:
    """(rows, tokens): the decode rows at once, then each prompt row."""
    decode = states.num_decode_rows
    if decode:
        yield slice(0, decode), decode
    for row, length in enumerate(states.query_lens[decode:], start=decode):
        if length:
            yield slice(row, row + 1), length


def gates(a_XH: Tensor, b_XH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) in float32: the logarithm of the state's decay, and the share of a value that is written."""
    return -A_log_H.float().exp() * F.softplus(a_XH.float() + dt_bias_H.float()), b_XH.float().sigmoid()


def gated_norm(x_XV: Tensor, z_XV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMS norm with a plain weight, times silu(z), in float32; rounded once, to x's type."""
    x = x_XV.float()
    normed_XV = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_V.float()
    return (normed_XV * F.silu(z_XV.float())).to(x_XV.dtype)


def heads_of(mixed_XC: Tensor, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 (q, k, v), [X, H, K or V]: normalised, q scaled, and each key head repeated for its value heads."""
    key_channels = (mixed_XC.shape[-1] - heads * value_dim) // 2
    q_XGK, k_XGK, v_XHV = (
        part.view(*part.shape[:-1], -1, size).float()
        for part, size in zip(
            torch.split(mixed_XC, [key_channels, key_channels, heads * value_dim], dim=-1),
            (key_dim, key_dim, value_dim),
            strict=True,
        )
    )
    group = heads // q_XGK.shape[-2]
    q_XHK, k_XHK = (unit(x).repeat_interleave(group, dim=-2) for x in (q_XGK, k_XGK))
    return q_XHK * key_dim**-0.5, k_XHK, v_XHV


def unit(x: Tensor) -> Tensor:
    """Divided by its length over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _in_chunks(x_LHX: Tensor, size: int) -> Tensor:
    """[H, N, B, X] of [L, H, X], with or without the last dimension; zeros after the end."""
    padded = F.pad(x_LHX.transpose(0, 1), (0, 0) * (x_LHX.dim() - 2) + (0, -len(x_LHX) % size))
    return padded.reshape(padded.shape[0], -1, size, *padded.shape[2:])


# the convolution


def convolution(history_W1C: Tensor, mixed_LC: Tensor, weight_C1W: Tensor) -> Tensor:
    """silu of the causal convolution along L, [L, C]. `history_W1C` are the W - 1 inputs before; sums are rounded first."""
    inputs_1CL = torch.cat((history_W1C, mixed_LC)).t()[None]
    summed_CL = F.conv1d(inputs_1CL.float(), weight_C1W.float(), groups=weight_C1W.shape[0])[0]
    return F.silu(summed_CL.t().to(mixed_LC.dtype))


def _row_convolution(
    mixed_LC: Tensor, weight_C1W: Tensor, conv_SWC: Tensor, slot: Tensor, positions_L: Tensor
) -> Tensor:
    """One row's convolution; its latest inputs go to the slot."""
    taps = weight_C1W.shape[2]
    before_W1 = positions_L[:1] + torch.arange(1 - taps, 0, device=mixed_LC.device)
    history_W1C = conv_SWC[slot, before_W1 % taps].masked_fill((before_W1 < 0)[:, None], 0)
    conv_SWC[slot, positions_L[-taps:] % taps] = mixed_LC[-taps:]
    return convolution(history_W1C, mixed_LC, weight_C1W)


def _step_convolution(
    mixed_DC: Tensor, weight_C1W: Tensor, conv_SWC: Tensor, slots_D: Tensor, positions_D: Tensor
) -> Tensor:
    """The convolution of decode rows, all at once; their inputs go to their slots."""
    taps = weight_C1W.shape[2]
    conv_SWC[slots_D, positions_D % taps] = mixed_DC
    seen_DW = positions_D[:, None] + torch.arange(1 - taps, 1, device=mixed_DC.device)
    inputs_DWC = conv_SWC[slots_D[:, None], seen_DW % taps].float().masked_fill((seen_DW < 0)[:, :, None], 0.0)
    summed_DC = (inputs_DWC * weight_C1W[:, 0].float().t()).sum(1)
    return F.silu(summed_DC.to(mixed_DC.dtype))


# the gated delta rule


def step(
    q_XHK: Tensor, k_XHK: Tensor, v_XHV: Tensor, g_XH: Tensor, beta_XH: Tensor, state_XHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of X rows: (outputs [X, H, V], new states). All float32."""
    state_XHKV = state_XHKV * g_XH.exp()[..., None, None]
    foreseen_XHV = (k_XHK[..., None, :] @ state_XHKV)[..., 0, :]
    change_XHV = beta_XH[..., None] * (v_XHV - foreseen_XHV)
    state_XHKV = state_XHKV + k_XHK[..., None] * change_XHV[..., None, :]
    return (q_XHK[..., None, :] @ state_XHKV)[..., 0, :], state_XHKV


def recurrent(
    q_LHK: Tensor, k_LHK: Tensor, v_LHV: Tensor, g_LH: Tensor, beta_LH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One row, token by token: (outputs [L, H, V], new state). The definition; all float32."""
    outputs: list[Tensor] = []
    for q_HK, k_HK, v_HV, g_H, beta_H in zip(q_LHK, k_LHK, v_LHV, g_LH, beta_LH, strict=True):
        out_HV, state_HKV = step(q_HK, k_HK, v_HV, g_H, beta_H, state_HKV)
        outputs.append(out_HV)
    return torch.stack(outputs), state_HKV


def chunked(
    q_LHK: Tensor,
    k_LHK: Tensor,
    v_LHV: Tensor,
    g_LH: Tensor,
    beta_LH: Tensor,
    state_HKV: Tensor,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """What `recurrent` gives, `size` tokens at a time.

    Within a chunk the changes c to the state solve (1 + A) c = beta (v - exp(G) k^T S), where A[i, j] is
    beta[i] (k[i] . k[j]) exp(G[i] - G[j]) below the diagonal, G the sum of g from the chunk's start and S the state there.
    """
    length, size = len(q_LHK), min(size, len(q_LHK))
    # [H, N, B, ...]; padding has beta 0 and g 0, so it changes nothing
    q, k, v, g, beta = (_in_chunks(x, size) for x in (q_LHK, k_LHK, v_LHV, g_LH, beta_LH))
    sums_HNB = g.cumsum(-1)
    below_BB = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay_HNBB = (sums_HNB[..., :, None] - sums_HNB[..., None, :]).masked_fill(~below_BB, -torch.inf).exp()
    written_HNBK = k * beta[..., None]
    system_HNBB = (written_HNBK @ k.transpose(-1, -2)) * decay_HNBB
    sides = torch.cat((v * beta[..., None], written_HNBK * sums_HNB.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system_HNBB, sides, upper=False, unitriangular=True)
    changes_HNBV, readers_HNBK = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    within_HNBB = (q @ k.transpose(-1, -2)) * decay_HNBB
    q_HNBK = q * sums_HNB.exp()[..., None]
    k_HNKB = (k * (sums_HNB[..., -1:] - sums_HNB).exp()[..., None]).transpose(-1, -2)
    kept_HN11 = sums_HNB[..., -1].exp()[..., None, None]
    outputs: list[Tensor] = []
    for chunk in range(q.shape[1]):
        change_HBV = changes_HNBV[:, chunk] - readers_HNBK[:, chunk] @ state_HKV
        outputs.append(q_HNBK[:, chunk] @ state_HKV + within_HNBB[:, chunk] @ change_HBV)
        state_HKV = state_HKV * kept_HN11[:, chunk] + k_HNKB[:, chunk] @ change_HBV
    return torch.cat(outputs, dim=1)[:, :length].transpose(0, 1), state_HKV
