"""What an assistant's answer consists of, as it comes: typed events that every chat API encodes in its own way.

Owns the types only. The machines of a `ChatFormat` make them from text; chat completions, responses and messages word them. Knows
neither tokens nor HTTP. Joining the deltas of one kind gives the same text however the answer was cut into steps.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AnswerReason = Literal["stop", "length", "tool_calls"]
ReasoningField = Literal["reasoning_content", "reasoning", "both"]
"""Names under which APIs that have no name of their own tell thinking."""


class ContentDelta(msgspec.Struct, frozen=True, tag=True):
    """More of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True):
    """More of the model's thinking."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag=True):
    """The next tool call begins: its name is complete. Calls never overlap; all that follows until the next start belongs to it."""

    index: int
    """0 for the answer's first call, then 1, ..."""
    id: str
    """Unique in the dialogue, in the form that the model's template wants back."""
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, tag=True):
    """More of a call's arguments. Joined they are the text of one JSON object, unless the answer was cut off."""

    index: int
    text: str


class AnswerDone(msgspec.Struct, frozen=True, tag=True):
    """The last event of every answer, exactly once."""

    finish_reason: AnswerReason
    """tool_calls if it ended by itself and made calls; after a call that the request named it is stop, as in the OpenAI API."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS and length."""


AnswerEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | AnswerDone
