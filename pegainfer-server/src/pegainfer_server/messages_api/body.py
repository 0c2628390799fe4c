"""The bodies of POST /v1/messages and its count_tokens: every supported field, its type and its range.

Owns what is accepted. What blocks, tools and thinking mean as a chat is `chat_request.py`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pegainfer_server.protocol import Int, Label, StrictBody


class CacheControl(StrictBody):
    """Where the caller would like a prefix cached. Without effect: every prefix is, by itself."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CallerMetadata(StrictBody):
    """About the caller; in the request's log line."""

    user_id: Label | None = None


class ThinkingOptions(StrictBody):
    """Whether to think, and how much."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves what the model thought out of the answer."""


class OutputFormat(StrictBody):
    """What the answer's text must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    """How much to think, and what the text must be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(StrictBody):
    """POST /v1/messages/count_tokens, and what /v1/messages shares with it: all that makes the prompt."""

    model: str | None = None
    messages: Any
    """Read by `chat_request.py`."""
    system: Any = None
    """A text, or a list of text blocks."""
    tools: list[Any] = []
    tool_choice: Any = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)]
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: CallerMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """There is one tier; the answer names it."""
