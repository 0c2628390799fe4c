"""Logits to ids and logprobs, for a whole step at once.

Owns the sampling state of each slot and the order of operations: vocabulary bound, logit bias, penalties, min_tokens, the mask of a
constraint, then greedy or temperature, top_k, top_p, min_p, draw. Logprobs are of the raw logits. Knows nothing of pages or scheduling.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegainfer_core.batch import to_device
from pegainfer_core.constraints import Constraint, Masks
from pegainfer_core.grammars import Grammars
from pegainfer_core.ops import sampling
from pegainfer_core.plan import Join
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.token_counts import TokenCounts


class SlotState:
    """What the sampler remembers of the request in a slot."""

    def __init__(self, join: Join, eos_token_ids: frozenset[int], masks: Masks) -> None:
        self.params: SamplingParams = join.params
        self.seed = join.seed
        self.num_output = len(join.output_ids)
        """Tokens taken: the next one has this index."""
        self._penalises = self.params.penalises
        self.token_counts = TokenCounts(join.prompt_ids, join.output_ids) if self._penalises else None
        self.stop_ids = sorted(set(self.params.stop_token_ids) | (set() if self.params.ignore_eos else eos_token_ids))
        self.constraint = masks.constraint(join, self.stop_ids)

    @property
    def ended(self) -> bool:
        """Whether a constraint knows that there is no next token."""
        return self.constraint is not None and self.constraint.ended

    @property
    def complete(self) -> bool:
        """Whether the answer is whole by its grammar."""
        return self.constraint is not None and self.constraint.complete

    @property
    def problem(self) -> str | None:
        """Why the next token cannot be chosen."""
        return None if self.constraint is None else self.constraint.problem

    def waits(self, output_index: int) -> bool:
        """Whether the choice of this token needs to know tokens that are not taken yet."""
        if self.constraint is None and not self._penalises:
            return False
        missing = output_index - self.num_output
        return missing > 0 and (self._penalises or (self.constraint is not None and self.constraint.may_bind(missing)))

    def takes_arg_max(self, output_index: int) -> bool:
        """Whether the next token is the arg max of the logits as they are."""
        params = self.params
        untouched = not (params.logit_bias or self._penalises or output_index < params.min_tokens)
        return params.greedy and untouched and not (self.constraint is not None and self.constraint.binds)

    def record(self, token_id: int) -> None:
        """Take a sampled token."""
        self.num_output += 1
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self.token_counts is not None:
            self.token_counts.add(token_id)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Raw logprobs of one token per row, and the most likely ones. On the device."""

    logprob_R: Tensor
    rank_R: Tensor
    top_logprobs_RN: Tensor
    top_ids_RN: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """On the device; nothing of it was waited for."""

    token_ids_N: Tensor
    finite_N: Tensor
    """int64; 0 where the logits held NaN or infinity: the id of such a row means nothing."""
    changed: list[int]
    """Places whose id is not the plain arg max."""
    logprobs: Logprobs | None
    """In the order of the states that want logprobs, if any does."""


class Sampler:
    """One instance per runner."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars` are those that the engine has compiled; without, no request has one."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._masks = Masks(vocab_size, eos_token_ids, grammars)

    def join(self, join: Join) -> SlotState:
        """State for a request that takes a slot."""
        return SlotState(join, self._eos_token_ids, self._masks)

    def prepare(self, states: Sequence[SlotState]) -> None:
        """Begin to compute, beside the caller, what the next tokens of these states need; call it when they took one."""
        self._masks.prepare([state.constraint for state in states if state.constraint is not None])

    def greedy(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, whether the logits are finite), int64 [N] each: the most likely decodable token. Capturable."""
        return sampling.greedy(logits_NV, self._vocab_size)

    def sample(
        self,
        logits_NV: Tensor,
        states: Sequence[SlotState],
        output_indices: Sequence[int],
        places: Sequence[int] | None = None,
        greedy: tuple[Tensor, Tensor] | None = None,
    ) -> Sampled:
        """One token per state; state i reads the logits at `places[i]` (default i). Rows in between are padding.

        `greedy` is what `greedy` gave for these logits; its ids are changed in place where another choice is due. Ids at
        or above the vocabulary bound are never chosen.
        """
        places = range(len(states)) if places is None else places
        token_ids_N, finite_N = self.greedy(logits_NV) if greedy is None else greedy
        special = [i for i, state in enumerate(states) if not state.takes_arg_max(output_indices[i])]
        changed = [places[i] for i in special]
        if special:
            rows = self._tensor(changed, np.int64)
            token_ids_N[rows] = self._choose(
                logits_NV[rows], [states[i] for i in special], [output_indices[i] for i in special]
            )
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        logprobs = None
        if wanted:
            rows = self._tensor([places[i] for i in wanted], np.int64)
            most = max(states[i].params.logprobs or 0 for i in wanted)
            logprobs = self.logprobs(logits_NV[rows], token_ids_N[rows], most)
        return Sampled(token_ids_N=token_ids_N, finite_N=finite_N, changed=changed, logprobs=logprobs)

    def _choose(self, logits_RV: Tensor, states: Sequence[SlotState], output_indices: Sequence[int]) -> Tensor:
        """Ids for states that need more than the arg max of their logits, which are a copy and may be changed."""
        bounded_RV = logits_RV[:, : self._vocab_size].float()
        self._adjust(bounded_RV, states, output_indices)
        drawn = [row for row, state in enumerate(states) if not state.params.greedy]
        token_ids_R = torch.empty(len(states), dtype=torch.int64, device=bounded_RV.device)
        if len(drawn) < len(states):
            token_ids_R, _ = self.greedy(bounded_RV)
        if drawn:
            rows = self._tensor(drawn, np.int64)
            keys = [sampling.row_key(states[row].seed, output_indices[row]) for row in drawn]
            ids = self._draw(bounded_RV[rows], [states[row].params for row in drawn], self._tensor(keys, np.int64))
            token_ids_R[rows] = ids
        return token_ids_R

    def logprobs(self, logits_RV: Tensor, token_ids_R: Tensor, count: int) -> Logprobs:
        """Raw log-softmax over the whole width, of the given tokens and of the `count` most likely decodable ones."""
        raw_RV = logits_RV.float()
        total_R1 = torch.logsumexp(raw_RV, dim=-1, keepdim=True)
        chosen_R1 = raw_RV.gather(1, token_ids_R[:, None])
        decodable_RV = raw_RV[:, : self._vocab_size]
        top_RN, top_ids_RN = sampling.top_logits(decodable_RV, min(count, self._vocab_size))
        return Logprobs(
            logprob_R=(chosen_R1 - total_R1)[:, 0],
            rank_R=(decodable_RV > chosen_R1).sum(dim=-1) + 1,
            top_logprobs_RN=top_RN - total_R1,
            top_ids_RN=top_ids_RN,
        )

    def _draw(self, logits_RV: Tensor, params: Sequence[SamplingParams], key_R: Tensor) -> Tensor:
        scaled_RV = logits_RV / self._tensor([p.temperature for p in params], np.float32)[:, None]
        width = scaled_RV.shape[1]
        top_k = [p.top_k if 0 < p.top_k < width else width for p in params]
        if any(k < width for k in top_k) or any(p.top_p < 1.0 for p in params):
            # Rows without a filter must not depend on whether others have one.
            filtered = [row for row, p in enumerate(params) if top_k[row] < width or p.top_p < 1.0]
            rows = self._tensor(filtered, np.int64)
            scaled_RV[rows] = sampling.filter_top_k_top_p(
                scaled_RV[rows],
                self._tensor([top_k[row] for row in filtered], np.int64),
                self._tensor([params[row].top_p for row in filtered], np.float32),
            )
        if any(p.min_p > 0.0 for p in params):
            logs = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
            scaled_RV = sampling.filter_min_p(scaled_RV, self._tensor(logs, np.float32))
        return sampling.sample(scaled_RV, key_R)

    def _adjust(self, logits_RV: Tensor, states: Sequence[SlotState], output_indices: Sequence[int]) -> None:
        """Logit bias, penalties, min_tokens and constraints, in place, for the rows that ask for them."""
        biased = [(row, state.params.logit_bias) for row, state in enumerate(states) if state.params.logit_bias]
        if biased:
            places = self._places((row, list(bias)) for row, bias in biased)
            values_N = self._tensor([value for _, bias in biased for value in bias.values()], np.float32)
            logits_RV.index_put_(places, values_N, accumulate=True)
        self._penalise(logits_RV, states)
        early = [
            (row, state.stop_ids)
            for row, (state, output_index) in enumerate(zip(states, output_indices, strict=True))
            if output_index < state.params.min_tokens and state.stop_ids
            if not (state.constraint is not None and state.constraint.binds)
        ]
        if early:
            logits_RV[self._places(early)] = -torch.inf
        self._constrain(logits_RV, [state.constraint for state in states])

    def _penalise(self, logits_RV: Tensor, states: Sequence[SlotState]) -> None:
        """Repetition, presence and frequency penalties, in place, of all rows at once."""
        counted = [(row, state.params, state.token_counts) for row, state in enumerate(states)]
        given = [(row, params, counts) for row, params, counts in counted if counts is not None]
        if not given:
            return
        sizes = [len(counts.ids) for _, _, counts in given]
        repetition_N = np.repeat([params.repetition_penalty for _, params, _ in given], sizes).astype(np.float32)
        subtracted = [
            np.float32(params.presence_penalty) * (counts.counts > 0)
            + np.float32(params.frequency_penalty) * counts.counts
            for _, params, counts in given
        ]
        factors = to_device(np.stack([repetition_N, np.concatenate(subtracted)]), self._device)
        places = self._places((row, counts.ids) for row, _, counts in given)
        values_N = logits_RV[places]
        values_N = torch.where(values_N > 0, values_N / factors[0], values_N * factors[0])
        logits_RV[places] = values_N - factors[1]

    def _places(self, ids_by_row: Iterable[tuple[int, Sequence[int] | np.ndarray]]) -> tuple[Tensor, Tensor]:
        """(row, id) of every id of these rows, on the device."""
        pairs = list(ids_by_row)
        rows = np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs])
        both = to_device(np.stack([rows, np.concatenate([ids for _, ids in pairs])]).astype(np.int64), self._device)
        return both[0], both[1]

    def _constrain(self, logits_RV: Tensor, constraints: Sequence[Constraint | None]) -> None:
        """Forbid what constraints forbid, in place. Waits for masks that are not computed yet."""
        bound = [(row, c) for row, c in enumerate(constraints) if c is not None and c.binds]
        if bound:
            words_RW = to_device(self._masks.words([constraint for _, constraint in bound]), self._device)
            if len(bound) == len(constraints):
                logits_RV.copy_(sampling.mask_tokens(logits_RV, words_RW))
                return
            rows = self._tensor([row for row, _ in bound], np.int64)
            logits_RV[rows] = sampling.mask_tokens(logits_RV[rows], words_RW)

    def _tensor(self, values: Sequence[float], dtype: type[np.generic]) -> Tensor:
        return to_device(np.asarray(values, dtype=dtype), self._device)
