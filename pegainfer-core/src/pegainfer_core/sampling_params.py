"""What a client may ask of the sampler, validated once, at the edge.

Owns the ranges and the defaults. Knows nothing of tensors: `sampler.py` carries it out. Immutable and msgspec-encodable, because
it travels to the engine process inside `AddRequest`.
"""

from __future__ import annotations

import math

import msgspec

from pegainfer_core.errors import RequestError
from pegainfer_core.field_types import wrong_fields
from pegainfer_core.structured import Grammar, Thinking

MAX_LOGPROBS = 20  # as the OpenAI API; bounds the per-step top-k work
MAX_LOGIT_BIAS = 300  # entries, as the OpenAI API
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 1e6  # as good as even odds
MIN_REPETITION_PENALTY = 1e-3  # it and its inverse: logits divided by either stay finite in float32
GREEDY_TEMPERATURE = 1e-5  # below this a temperature is greedy


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next token, and when to stop. Stop *strings* are not here: the engine sees ids only."""

    max_tokens: int | None = None
    """Most tokens to generate; None means as many as the context allows. 0 is allowed with `prompt_logprobs` only."""
    temperature: float = 1.0
    """Divides the logits; below 1e-5 the choice is greedy and the filters are ignored."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all; more than the vocabulary keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, after top_k."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence from the logit of every token already in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> value in [-100, 100] added to its logit before everything else but the vocabulary bound."""
    seed: int | None = None
    """Same seed, same logits: same tokens, whatever else is in the batch. None draws one."""
    min_tokens: int = 0
    """EOS and stop ids are masked until this many tokens exist."""
    stop_token_ids: tuple[int, ...] = ()
    """End with finish reason stop when one is sampled; reported as `stop_token_id`. Independent of ignore_eos."""
    ignore_eos: bool = False
    """Do not stop at the family's EOS ids."""
    logprobs: int | None = None
    """Report the sampled token's logprob and this many alternatives (0 to 20); None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token. Disables reading the prefix cache for this request."""
    grammar: Grammar | None = None
    """What the answer must be. It binds what follows the thinking; at its end the request ends, whatever min_tokens says."""
    thinking: Thinking | None = None
    """Where thinking begins and ends, if the model may think: a grammar does not bind it, and it may have a budget."""

    def __post_init__(self) -> None:
        """Raise RequestError naming the first field that is of another type or out of range."""
        for name, problem in wrong_fields(self):
            raise RequestError(f"{name} {problem}", param=name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise RequestError(f"{name} must be a finite number, got {value}", param=name)
        _check(
            0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"in [0, {MAX_TEMPERATURE:g}]", self.temperature
        )
        _check(self.top_k >= -1, "top_k", "-1 or 0 (off) or positive", self.top_k)
        _check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        _check(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= 1.0 / MIN_REPETITION_PENALTY,
            "repetition_penalty",
            f"in [{MIN_REPETITION_PENALTY:g}, {1.0 / MIN_REPETITION_PENALTY:g}]",
            self.repetition_penalty,
        )
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _check(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"at most {MAX_LOGIT_BIAS} entries",
            len(self.logit_bias),
        )
        for token_id, bias in self.logit_bias.items():
            _check(token_id >= 0, "logit_bias", "keyed by token ids of 0 or more", token_id)
            _check(math.isfinite(bias) and -100.0 <= bias <= 100.0, "logit_bias", "in [-100, 100]", bias)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "0 or more", self.max_tokens)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens of 0 needs prompt logprobs (echo with logprobs)", param="max_tokens")
        _check(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"at most max_tokens ({self.max_tokens})",
                self.min_tokens,
            )
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids",
            len(self.stop_token_ids),
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, f"in 0..{MAX_LOGPROBS}", value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen (ties to the lowest id)."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on which tokens were seen before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_prompt(self) -> bool:
        """Whether computing an answer needs the prompt's ids beside the inputs of each step."""
        return self.penalises or self.prompt_logprobs is not None


def _check(ok: bool, name: str, wanted: str, got: object) -> None:
    if not ok:
        raise RequestError(f"{name} must be {wanted}, got {got}", param=name)
