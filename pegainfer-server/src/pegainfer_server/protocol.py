"""The bodies that the routes take: every supported field, its type and its range.

Owns what is accepted; an unknown field is an error. Types are strict: no true as number, no "1" as number. What a field means is in
`sampling.py`, `completions.py` and `chat.py`; ranges of sampling values are `SamplingParams`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator

from pegainfer_server.body import StrictBody as StrictBody
from pegainfer_server.format_fields import FormatFields

MAX_CHOICES_PER_PROMPT = 128  # n, as the OpenAI API
MAX_CHOICES = 2048  # prompts times n of one request
MAX_STOP_STRINGS = 16  # the OpenAI API takes 4; evaluation harnesses send more
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_TOP_LOGPROBS = 20
MAX_TEMPLATE_LENGTH = 65_536  # characters of a request's own chat template
MAX_LABEL_LENGTH = 512  # characters of what a client says about itself, which a log line repeats
MAX_METADATA = 16  # pairs, as the OpenAI API
MAX_TIMEOUT = 24 * 3600.0  # seconds

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""What fits the wire to the engine."""
Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much to think."""

TIER_PRIORITIES = {"flex": 1, "priority": -1}
"""Tiers of the OpenAI API that are served later or sooner than others."""


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [_TEXT, _IDS, *({"type": "array", "items": item, "minItems": 1} for item in (_TEXT, _IDS))]}
    ),
]
"""Described for clients; read, with better errors than pydantic's, by `prompts.py`."""
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": "string"},
    },
}
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
"""Described for clients in its plainest form; read by `chat_messages.py`, which takes more."""


class StreamOptions(StrictBody):
    """What a stream carries besides text."""

    include_usage: bool = False
    """One more event before the end, without choices, with usage."""
    continuous_usage_stats: bool = False
    """Usage so far in every event."""


class CallerFields(StrictBody):
    """Who calls and how it is to be served: nothing that changes the text of an answer."""

    user: Label | None = None
    """The caller's name for the end user; in the request's log line."""
    safety_identifier: Label | None = None
    """The newer name of `user`."""
    metadata: dict[str, Label] = {}
    """Up to 16 pairs; in the request's log line."""
    prompt_cache_key: Label | None = None
    """A hint which cache to use, without effect: there is one, and it finds equal prefixes by itself."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """flex and priority are priorities 1 and -1 of the queue; the answer names the tier that served it."""
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """Prefixes are shared with requests of the same salt only."""
    priority: Int = 0
    """Lower runs first."""
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    """Seconds from the request's arrival, after which it is ended with an error (408)."""

    @field_validator("metadata")
    @classmethod
    def _not_too_many_pairs(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > MAX_METADATA or any(len(key) > MAX_LABEL_LENGTH for key in value):
            raise ValueError(f"at most {MAX_METADATA} pairs of at most {MAX_LABEL_LENGTH} characters are supported")
        return value

    @field_validator("priority")
    @classmethod
    def _one_way_to_say_it(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("service_tier") in TIER_PRIORITIES:
            raise ValueError("excludes a service_tier that is a priority itself")
        return value

    @property
    def queue_priority(self) -> int:
        """For the scheduler: lower runs first."""
        return TIER_PRIORITIES.get(self.service_tier or "auto", self.priority)

    @property
    def served_tier(self) -> dict[str, str]:
        """The tier, as an answer names it if the request did."""
        if self.service_tier is None:
            return {}
        return {"service_tier": "default" if self.service_tier == "auto" else self.service_tier}

    @property
    def caller(self) -> dict[str, Any]:
        """What the client says about itself, by field: for the log."""
        named = {"user": self.user, "safety_identifier": self.safety_identifier, "metadata": self.metadata}
        return {name: value for name, value in named.items() if value}


class SamplingFields(CallerFields):
    """How tokens are chosen and when to stop. Absent fields take the checkpoint's defaults."""

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


class GenerationBody(FormatFields, SamplingFields):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: Literal[False] = False
    """Nothing is stored, so true is refused."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] = 1
    max_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Logprobs of the prompt's tokens, with this many alternatives, in each choice."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("stream_options")
    @classmethod
    def _only_with_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream to be true")
        return value


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    """A string, a list of strings, a list of token ids, or a list of such lists; read by `prompts.py`."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Int | None = None
    """Only n itself is supported."""
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    """Read by `chat_messages.py`."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Effort | None = None
    """none turns thinking off; anything else turns it on, in the degree that the template knows."""
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_LENGTH)] | None = None
    """A template in place of the checkpoint's, where the server trusts requests that far."""
    tools: Any = None
    """Read by `chat_tools.py`."""
    tool_choice: Any = None
    """Default: auto with tools, none without."""
    parallel_tool_calls: bool = True
    """False: an answer ends with its first call."""
    include_reasoning: bool = True
    """False: thinking is left out of the answer."""
    stop_in_reasoning: bool = False
    """Whether a stop string may also end the answer while the model thinks."""
    thinking_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Most tokens of thinking; then its end is forced."""
    max_thinking_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Another name of `thinking_budget`."""

    @field_validator("max_thinking_tokens")
    @classmethod
    def _one_budget(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("thinking_budget") not in (None, value):
            raise ValueError("differs from thinking_budget, of which it is another name")
        return value

    @property
    def requested_thinking_budget(self) -> int | None:
        """The budget under either name."""
        return self.max_thinking_tokens if self.thinking_budget is None else self.thinking_budget


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
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_LENGTH)] | None = None
    """A template in place of the checkpoint's, where the server trusts requests that far."""
    tools: Any = None
    """Shown to the template, as a chat with them would be."""


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int]
