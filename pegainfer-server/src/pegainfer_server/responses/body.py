"""The body of POST /v1/responses: every supported field, its type and its range.

Owns what is accepted. What input items, tools and formats mean as a chat is `chat_request.py`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pegainfer_server.protocol import Effort, SamplingFields, StrictBody


class ReasoningOptions(StrictBody):
    """How much to think."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted in any form: what the model thought is told in full, which no summary adds to."""


class TextFormat(StrictBody):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictBody):
    """The answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Models here have one verbosity."""


class ResponseStreamOptions(StrictBody):
    """What a stream carries besides its events."""

    include_obfuscation: Literal[False] = False
    """Events are not padded."""


class ResponsesBody(SamplingFields):
    """POST /v1/responses. Nothing is stored: what refers to an earlier response is refused."""

    model: str | None = None
    input: Any
    """A text, or a list of items; read by `chat_request.py`."""
    instructions: str | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    tools: list[Any] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] = []
    """encrypted_content carries the thinking, for clients that send back nothing else of it."""
    truncation: Literal["disabled"] = "disabled"
    """What does not fit is refused, never cut."""
    background: Literal[False] = False
    store: bool = False
    """Nothing is stored, and the answer says so."""
    chat_template_kwargs: dict[str, Any] = {}
