"""The sampler against independent statements of what each parameter means, in numpy, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegainfer_core.ops import sampling
from pegainfer_core.plan import Join
from pegainfer_core.sampler import Sampled, Sampler
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.token_counts import TokenCounts

VOCAB = 50
WIDTH = 56
EOS = frozenset({3})


def sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, EOS, torch.device("cpu"))


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    seeds: list[int] | None = None,
    index: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    vocab_size: int = VOCAB,
) -> Sampled:
    made = sampler(vocab_size)
    states = [
        made.join(
            Join(
                slot=row,
                params=each,
                seed=row if seeds is None else seeds[row],
                prompt_ids=prompt or [0],
                output_ids=output or [],
            )
        )
        for row, each in enumerate(params)
    ]
    return made.sample(logits, states, [index] * len(params))


def random_logits(rows: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by the definitions: top_k, then top_p of the rest, then min_p."""
    scaled = logits[:VOCAB].astype(np.float64) / params.temperature
    order = sorted(range(VOCAB), key=lambda token: (-scaled[token], token))
    keep = order[: params.top_k] if 0 < params.top_k < VOCAB else order
    weights = np.exp(scaled[keep] - scaled[keep].max())
    weights /= weights.sum()
    nucleus: list[int] = []
    mass = 0.0
    for token, weight in zip(keep, weights, strict=True):
        if nucleus and mass >= params.top_p:
            break
        nucleus.append(token)
        mass += float(weight)
    return {token for token in nucleus if scaled[token] >= scaled.max() + np.log(max(params.min_p, 1e-300))}


@given(
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 2, 7, VOCAB, 10**9]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_only_allowed_tokens_are_drawn(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """D4."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(1, seed)
    draws = sample(logits.expand(64, -1), [params] * 64, seeds=list(range(64))).token_ids_N.tolist()
    assert set(draws) <= allowed(logits[0].numpy(), params)


def test_draws_follow_the_distribution() -> None:
    """D3."""
    logits = random_logits(1, 4)
    count = 20_000
    params = SamplingParams(temperature=1.3, top_p=0.95)
    draws = sample(logits.expand(count, -1), [params] * count, seeds=list(range(count))).token_ids_N
    keep = sorted(allowed(logits[0].numpy(), params))
    expected = torch.softmax(logits[0, keep].double() / 1.3, dim=-1)
    observed = torch.bincount(draws, minlength=WIDTH)[keep].double()
    assert observed.sum() == count
    chi_square = float(((observed - count * expected) ** 2 / (count * expected)).sum())
    # 99.99 % point of chi-square with as many degrees of freedom, Wilson-Hilferty.
    freedom = len(keep) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    """D1, D2."""
    logits = random_logits(6, 1)
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(temperature=0.9, presence_penalty=1.0, logprobs=2),
    ]
    seeds = [9, 9, 9, 1, 2, 3]
    together = sample(logits, params, seeds=seeds, index=5).token_ids_N.tolist()
    for row in range(6):
        alone = sample(logits[row : row + 1], [params[row]], seeds=[seeds[row]], index=5).token_ids_N.tolist()
        assert alone == [together[row]]


def test_noise_depends_on_seed_and_position_and_is_even() -> None:
    keys = torch.tensor([sampling.row_key(seed, index) for seed in range(40) for index in range(40)])
    assert len(set(keys.tolist())) == 1600
    noise = sampling.exponential_noise(keys, 500)
    assert bool((noise > 0).all())
    assert abs(float(noise.mean()) - 1.0) < 0.01
    assert abs(float(noise.std()) - 1.0) < 0.01
    assert abs(float(torch.corrcoef(noise[:2])[0, 1])) < 0.2


def test_greedy_takes_the_lowest_of_equal_ids_and_never_padding() -> None:
    """D2, B13."""
    logits = torch.zeros(2, WIDTH)
    logits[0, [7, 11, 30]] = 5.0
    logits[:, VOCAB:] = 100.0
    logits[1, 20] = 1.0
    greedy = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=1)]
    assert sample(logits, greedy).token_ids_N.tolist() == [7, 20]


def test_padding_is_never_drawn_even_when_it_dominates() -> None:
    """B13."""
    logits = random_logits(1, 2)
    logits[:, VOCAB:] = 50.0
    draws = sample(logits.expand(200, -1), [SamplingParams(temperature=100.0)] * 200).token_ids_N
    assert int(draws.max()) < VOCAB


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_their_row_only(poison: float) -> None:
    """D9."""
    logits = random_logits(3, 3)
    clean = sample(logits, [SamplingParams(temperature=1.0)] * 3).token_ids_N.tolist()
    if poison == float("-inf"):
        logits[1] = poison
    else:
        logits[1, 17] = poison
    got = sample(logits, [SamplingParams(temperature=1.0)] * 3)
    assert got.finite_N.tolist() == [1, 0, 1]
    assert [got.token_ids_N.tolist()[row] for row in (0, 2)] == [clean[0], clean[2]]


def test_repetition_counts_prompt_and_output_and_the_others_output_only() -> None:
    """D7."""
    logits = torch.zeros(1, WIDTH)
    logits[0, 10], logits[0, 11], logits[0, 12] = 4.0, 3.9, -1.0

    def best(prompt: list[int], output: list[int], **params: Any) -> int:
        each = SamplingParams(temperature=0.0, **params)
        return int(sample(logits, [each], prompt=prompt, output=output).token_ids_N[0])

    assert best([10], [], repetition_penalty=1.5) == 11
    assert best([5], [10], repetition_penalty=1.5) == 11
    assert best([10], [], presence_penalty=2.0) == 10
    assert best([5], [10], presence_penalty=0.2) == 11
    assert best([5], [10], frequency_penalty=0.05) == 10
    assert best([5], [10, 10, 10], frequency_penalty=0.05) == 11
    negative = torch.full((1, WIDTH), -2.0)
    negative[0, 4] = -1.5
    each = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert int(sample(negative, [each], prompt=[4]).token_ids_N[0]) != 4


def test_sampled_tokens_join_the_counts() -> None:
    made = sampler()
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    state = made.join(Join(slot=0, params=params, seed=0, prompt_ids=[1], output_ids=[]))
    logits = torch.zeros(1, WIDTH)
    logits[0, 10], logits[0, 11] = 1.0, 0.5
    tokens = []
    for index in range(3):
        tokens.append(int(made.sample(logits, [state], [index]).token_ids_N[0]))
        state.record(tokens[-1])
    assert tokens == [10, 11, 0]


@given(st.lists(st.integers(0, 40), max_size=90), st.lists(st.integers(0, 40), max_size=300), st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_counts_are_those_of_the_output(prompt: list[int], output: list[int], known: int) -> None:
    counts = TokenCounts(prompt, output[:known])
    for token_id in output[known:]:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token_id: output.count(token_id) for token_id in {*prompt, *output}}


def test_penalties_of_rows_that_share_a_step() -> None:
    """Each row's are its own: the same as alone."""
    logits = random_logits(4, 7)
    each = [
        SamplingParams(temperature=0.0, repetition_penalty=3.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=-1.0, logit_bias={3: 2.0}),
        SamplingParams(temperature=0.0, logit_bias={30: 50.0, 3: 1.0}),
    ]
    made = sampler()
    states = [
        made.join(Join(slot=row, params=params, seed=0, prompt_ids=[1, 5], output_ids=[row, 9, 9]))
        for row, params in enumerate(each)
    ]
    together = made.sample(logits.clone(), states, [3] * 4).token_ids_N.tolist()
    alone = [int(made.sample(logits[row : row + 1].clone(), [states[row]], [3]).token_ids_N[0]) for row in range(4)]
    assert together == alone
    assert together[3] == 30


def test_bias_and_min_tokens() -> None:
    """D15."""
    logits = random_logits(1, 5)
    assert sample(logits, [SamplingParams(temperature=0.0, logit_bias={31: 100.0})]).token_ids_N.tolist() == [31]
    best = int(sample(logits, [SamplingParams(temperature=0.0)]).token_ids_N[0])
    banned = SamplingParams(temperature=0.0, logit_bias={best: -100.0})
    assert int(sample(logits, [banned]).token_ids_N[0]) != best
    logits[0, 3] = 90.0
    logits[0, 4] = 80.0
    wait = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9, stop_token_ids=(4,))
    assert int(sample(logits, [wait], index=1).token_ids_N[0]) not in (3, 4)
    assert int(sample(logits, [wait], index=2).token_ids_N[0]) == 3
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9, ignore_eos=True)
    assert int(sample(logits, [ignoring], index=0).token_ids_N[0]) == 3


def test_logprobs_are_raw_ranked_and_in_order() -> None:
    logits = random_logits(2, 6)
    logits[0, [5, 9]] = 20.0
    logits[1, [2, 1, 8]] = -0.0
    logits[1, 30] = 0.0
    logits[1] = logits[1].clamp(max=0.0)
    params = [
        SamplingParams(temperature=0.0, logprobs=4, logit_bias={5: -100.0, 9: -100.0}),
        SamplingParams(temperature=0.0, logprobs=4),
    ]
    got = sample(logits, params)
    assert got.logprobs is not None
    reference = torch.log_softmax(logits.double(), dim=-1)
    for row in range(2):
        token_id = int(got.token_ids_N[row])
        assert abs(float(got.logprobs.logprob_R[row]) - float(reference[row, token_id])) < 1e-5
        assert int(got.logprobs.rank_R[row]) == int((logits[row, :VOCAB] > logits[row, token_id]).sum()) + 1
        values = (logits[row, :VOCAB] + 0.0).tolist()
        order = sorted(range(VOCAB), key=lambda token: (-values[token], token))[:4]
        assert got.logprobs.top_ids_RN[row].tolist() == order
        assert torch.allclose(got.logprobs.top_logprobs_RN[row].double(), reference[row, order], atol=1e-5)
    assert int(got.logprobs.rank_R[0]) > 2, "the two biased away are still the most likely"


def test_half_precision_logits_are_read_as_float32() -> None:
    logits = random_logits(2, 8).bfloat16()
    params = [SamplingParams(temperature=0.0, logprobs=1)] * 2
    got = sample(logits, params)
    assert got.logprobs is not None and got.logprobs.logprob_R.dtype == torch.float32
    assert torch.equal(got.token_ids_N, logits[:, :VOCAB].float().argmax(-1))


def test_mask_keeps_the_tokens_whose_bits_are_set() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(3, 75, generator=generator)
    words_RW = torch.randint(-(2**31), 2**31 - 1, (3, 3), generator=generator, dtype=torch.int32)
    masked_RV = sampling.mask_tokens(logits_RV, words_RW)
    for row, words in enumerate(words_RW.tolist()):
        for token_id in range(75):
            kept = words[token_id // 32] >> token_id % 32 & 1
            assert masked_RV[row, token_id] == (logits_RV[row, token_id] if kept else -torch.inf)
