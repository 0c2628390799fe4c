"""A request's sampling fields, with the checkpoint's defaults, as `SamplingParams`.

Owns who wins: what the request says explicitly, else generation_config.json, else the OpenAI API's default. Knows nothing of prompts'
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pegainfer_core.errors import ConfigError, RequestError
from pegainfer_core.messages import EngineInfo
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.structured import Grammar

from pegainfer_server.http_errors import ApiError, bad_request, context_exceeded
from pegainfer_server.protocol import GenerationBody

DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of generation_config.json that become defaults of requests, beside max_new_tokens (as max_tokens, of chats)."""


def defaults_from_generation_config(generation_config: Mapping[str, Any]) -> dict[str, float | int]:
    """The sampling defaults of a checkpoint, for `ServerState.default_sampling`.

    Raises ConfigError for values that no request could use: the start fails, not every request.
    """
    given = {key: generation_config.get(key) for key in (*DEFAULT_KEYS, "max_new_tokens")}
    defaults = {"max_tokens" if key == "max_new_tokens" else key: v for key, v in given.items() if v is not None}
    for key, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int if key in ("top_k", "max_tokens") else int | float):
            raise ConfigError(f"generation_config.json: {key} must be a number, got {value!r}")
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}") from None
    return defaults


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, float | int],
    info: EngineInfo,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """What all choices of a request share; see `for_choice`. Raises RequestError or ApiError naming the field."""
    values: dict[str, Any] = {name: defaults[name] for name in DEFAULT_KEYS if name in defaults}
    for name in DEFAULT_KEYS:
        given = getattr(body, name)
        if given is not None:
            values[name] = given
    values["top_k"] = min(
        values.get("top_k", 0), info.vocab_size
    )  # more keeps all as well; the engine's integers are smaller
    stop_token_ids = _token_ids(body.stop_token_ids, "stop_token_ids", info.vocab_size)
    return SamplingParams(
        **values,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias, info.vocab_size),
        seed=body.seed,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def for_choice(params: SamplingParams, *, max_tokens: int, choice: int) -> SamplingParams:
    """`params` for choice number `choice` of a prompt: a seed becomes seed + choice (wrapping at 64 bits), so that choices differ."""
    seed = params.seed
    if seed is not None and choice:
        seed = (seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)


def clamp_max_tokens(wanted: int | None, prompt_tokens: int, info: EngineInfo) -> int:
    """Tokens a choice may have: what was asked for, cut to the room that the prompt leaves (then the finish reason is length).

    Raises ApiError if the prompt leaves no room. One that fills the context may ask for 0 tokens (echo).
    """
    room = info.max_model_len - prompt_tokens
    if room < 0 or (room == 0 and wanted != 0):
        raise context_exceeded(prompt_tokens, info.max_model_len)
    return room if wanted is None else min(wanted, room)


def requested_max_tokens(body: GenerationBody, defaults: Mapping[str, float | int] | None = None) -> int | None:
    """max_completion_tokens before max_tokens (its older name), before the one of `defaults`."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    default = (defaults or {}).get("max_tokens")
    return int(default) if asked is None and default is not None else asked


def check_prompt_logprobs(body: GenerationBody) -> None:
    """Raise ApiError where they are asked for in a stream, whose events have no place for them."""
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "not supported in a stream")


def unsupported(name: str, reason: str) -> ApiError:
    """A field whose value asks for something that is not there."""
    return bad_request(f"{name}: {reason}", name, code="unsupported_field")


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise bad_request(f"logit_bias: keys are token ids written as strings, got {key[:40]!r}", "logit_bias")
        result[int(key)] = bias
    _token_ids(list(result), "logit_bias", vocab_size)
    return result


def _token_ids(ids: list[int], name: str, vocab_size: int) -> list[int]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_request(f"{name}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", name)
    return ids
