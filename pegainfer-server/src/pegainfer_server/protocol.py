"""The bodies that the routes take: every supported field, its type and its range.

Owns what is accepted; an unknown field is an error. Types are strict: no true as number, no "1" as number. What a field means is in
`sampling.py`, `completions.py` and `chat.py`; ranges of sampling values are `SamplingParams`'s.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

IGNORED_FIELDS: dict[str, type] = {
    "user": str,
    "safety_identifier": str,
    "metadata": dict,
    "store": bool,
    "prompt_cache_key": str,
}
"""Accepted and ignored, with their types: they tell the operator about the caller and ask nothing of the answer. Everything else that is
not declared below is a 400 naming it."""

MAX_CHOICES_PER_PROMPT = 128  # n, as the OpenAI API
MAX_CHOICES = 2048  # prompts times n of one request
MAX_STOP_STRINGS = 16  # the OpenAI API takes 4; evaluation harnesses send more
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_TOP_LOGPROBS = 20

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""What fits the wire to the engine."""


class StrictBody(BaseModel):
    """Base of all bodies: unknown fields, other types and non-finite numbers are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(StrictBody):
    """What a stream carries besides text."""

    include_usage: bool = False
    """One more event before the end, without choices, with usage."""
    continuous_usage_stats: bool = False
    """Usage so far in every event."""


class GenerationBody(StrictBody):
    """What completions and chat completions share. Absent sampling fields take the checkpoint's defaults."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] = 1
    max_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    min_tokens: Int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: list[str] = []
    stop_token_ids: list[Int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Int = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("stream_options")
    @classmethod
    def _only_with_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream to be true")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_of_one(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops_are_usable(cls, value: list[str]) -> list[str]:
        if len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are supported")
        if not all(value):
            raise ValueError("a stop string must not be empty")
        if any(len(stop) > MAX_STOP_LENGTH for stop in value):
            raise ValueError(f"a stop string has at most {MAX_STOP_LENGTH} characters")
        return value

    @field_validator("response_format")
    @classmethod
    def _format_is_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is supported')
        return value


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    """A string, a list of strings, a list of token ids, or a list of such lists; read by `prompts.py`."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Int | None = None
    """Only n itself is supported."""
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Any
    """Read by `chat_messages.py`."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Any = None
    """Only an empty list is supported yet."""
    tool_choice: Any = None
    """Only "none" is supported yet."""


class TokenizeBody(StrictBody):
    """POST /tokenize, of a prompt or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt. A chat template writes its own: with messages only false is supported."""
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int]
