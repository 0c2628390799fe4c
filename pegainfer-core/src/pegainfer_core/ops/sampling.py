"""Choosing tokens from logits, as plain tensor functions.

Owns the mathematics: filters, noise, raw logprobs. Knows nothing of requests, slots or parameters' defaults.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pegainfer_core.ops import token_cpu
from pegainfer_core.ops.dispatch import use_cpu, use_triton

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STRIDE = 0xD1342543DE82EF95
"""Odd, and not _GOLDEN, by which token ids move: draws of one seed must not be shifted copies of each other."""
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def greedy(logits_NV: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(arg max, whether it is finite), int64 [N] each, over the first `vocab_size` ids; ties to the lowest id.

    NaN wins every comparison, and a row of nothing but -inf has -inf for its maximum: both show in the second value.
    """
    if use_triton(logits_NV):
        from pegainfer_core.ops import token_triton

        return token_triton.greedy(logits_NV, vocab_size)
    if use_cpu(logits_NV):
        return token_cpu.greedy(logits_NV, vocab_size)
    bounded_NV = logits_NV[:, :vocab_size]
    token_ids_N = torch.argmax(bounded_NV, dim=-1)
    best_N = bounded_NV.gather(1, token_ids_N[:, None])[:, 0]
    return token_ids_N, torch.isfinite(best_N).long()


def mask_tokens(logits_RV: Tensor, words_RW: Tensor) -> Tensor:
    """Logits (float32, without +inf) with -inf where a row's bit is 0: bit i of word w stands for token 32 w + i.

    `words_RW` int32, of at least V bits. A sum with what each byte stands for is the fastest on a CPU.
    """
    added = _added_by_byte(words_RW.device).index_select(0, words_RW.view(torch.uint8).flatten().int())
    return logits_RV + added.view(len(words_RW), -1)[:, : logits_RV.shape[1]]


@functools.cache
def _added_by_byte(device: torch.device) -> Tensor:
    """For each byte, lowest bit first: 0 where the bit is set, else -inf. Float32 [256, 8]."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)


def row_key(seed: int, output_index: int) -> int:
    """Signed 64-bit key of one draw: the seed scrambled, moved by the position in the output, scrambled again."""
    return _signed(_mix((_mix(seed & _MASK64) + output_index * _STRIDE) & _MASK64))


def exponential_noise(key_R: Tensor, vocab_size: int) -> Tensor:
    """Exponential variates [R, V], float64: a pure function of (row key, token id), whatever else is in the batch."""
    token_V = torch.arange(vocab_size, dtype=torch.int64, device=key_R.device)
    x = key_R[:, None] + token_V[None, :] * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    bits = _shift_right(x ^ _shift_right(x, 31), 32)
    return -torch.log((bits.double() + 0.5) * 2.0**-32)


def sample(scaled_RV: Tensor, key_R: Tensor) -> Tensor:
    """Ids [R] drawn from softmax(scaled): the arg max of logits plus Gumbel noise. Tokens at -inf are never drawn."""
    if use_cpu(scaled_RV) and (ids_R := token_cpu.sample(scaled_RV, key_R)) is not None:
        return ids_R
    if use_triton(scaled_RV):
        from pegainfer_core.ops import token_triton

        return token_triton.sample(scaled_RV, key_R)
    noise_RV = exponential_noise(key_R, scaled_RV.shape[1])
    return torch.argmax(scaled_RV.double() - torch.log(noise_RV), dim=-1)


def filter_top_k_top_p(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Logits with -inf outside the k most likely tokens, then outside the smallest set that reaches top_p of what is left.

    `top_k_R` int64 is at least 1 (the vocabulary size keeps all); ties go to the lowest id; one token is always kept.
    """
    sorted_RV, order_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R[:, None], -torch.inf)
    probability_RV = torch.softmax(sorted_RV, dim=-1)
    before_RV = probability_RV.cumsum(dim=-1) - probability_RV
    drop_RV = (before_RV >= top_p_R[:, None]) & (rank_V > 0)
    sorted_RV = sorted_RV.masked_fill(drop_RV, -torch.inf)
    return torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV)


def filter_min_p(scaled_RV: Tensor, log_min_p_R: Tensor) -> Tensor:
    """Logits with -inf where the probability is below min_p times the largest; `log_min_p_R` is -inf where off."""
    floor_R = scaled_RV.amax(dim=-1) + log_min_p_R
    return scaled_RV.masked_fill(scaled_RV < floor_R[:, None], -torch.inf)


def top_logits(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values and their ids per row, equal values by ascending id (which torch.topk does not promise)."""
    vocab_size = logits_RV.shape[1]
    bits = (logits_RV.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(vocab_size, device=logits_RV.device)
    keys = (ordered << 32) + (vocab_size - 1 - ids)
    top = keys.topk(count, dim=-1).values
    top_ids = vocab_size - 1 - (top & 0xFFFFFFFF)
    return logits_RV.gather(1, top_ids), top_ids


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 shifts in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: int) -> int:
    """SplitMix64's step and finaliser (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
