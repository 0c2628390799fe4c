"""How a family writes thinking and tool calls: what it declares, and what a reader of its calls must do.

Owns the interfaces between `AnswerParser`, the families' syntaxes and those who force calls by a grammar. Knows no particular syntax.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegainfer_core.chat_syntax.arguments import ArgumentTypes
from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.source import Pattern, TextSource, Waiting
from pegainfer_core.structured import LarkBuilder


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON schema of its arguments object; empty: any object."""
    strict: bool = False
    """Whether a schema that cannot be enforced as a whole is an error, where calls are forced."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema, at least that of an object."""
        return {"type": "object", **self.parameters}


Tools = Mapping[str, Tool]
"""Tools by name, in the order of the request."""


class CallSink(ABC):
    """Takes what a reader finds, in this order for each call: start, any number of arguments, end."""

    @abstractmethod
    def start(self, name: str) -> None:
        """A call's name is known."""

    @abstractmethod
    def arguments(self, text: str) -> None:
        """More of the JSON text of its arguments."""

    @abstractmethod
    def end(self) -> None:
        """The call is complete, or as complete as it will ever be."""


class CallSyntax(ABC):
    """How calls are written. One object serves all answers: readers keep their state in local variables."""

    @property
    @abstractmethod
    def openers(self) -> Sequence[Pattern]:
        """What begins one or more calls, long enough that prose which merely names a mark is none. One pattern may go on where another
        one ends, then the longer one comes first."""

    @abstractmethod
    def read(self, source: TextSource, tools: Tools, sink: CallSink) -> Waiting[bool]:
        """Read what begins with an opener, which is unread; False, with nothing told to the sink, if it is no call after all."""

    @abstractmethod
    def forced(self, builder: LarkBuilder, tool: Tool) -> str:
        """The expression of `builder` for one call of `tool`."""

    def around_forced(self, builder: LarkBuilder) -> tuple[str, str]:
        """Expressions before and after all forced calls."""
        del builder
        return "", ""

    separator = ""
    """What stands between two calls of an answer."""

    def call_id(self, name: str, number: int) -> str:
        """An id for call number `number` of the dialogue, counted from 0."""
        del name, number
        return f"call_{uuid.uuid4().hex[:24]}"

    def history(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages with what the template is particular about set right."""
        return messages

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """What to tell a model whose template does not show tools; None: such a model gets none."""
        del tools
        return None

    def written(self, name: str, arguments: Any) -> str:
        """A call of the history as the model would have written it, for templates that do not show calls."""
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around thinking."""

    opening: str
    """As it is written."""
    closing: str
    open: str
    """As it is read (see `Marks`)."""
    close: str
    open_id: int | None
    """The token that opens it; None if that takes several tokens."""
    close_id: int | None
    anywhere: bool = False
    """Whether thinking may begin anywhere in the answer: sensible where the mark is a special token."""
    label: str = ""
    """Text that belongs to the opening mark, such as the name of a channel."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatSyntax:
    """All that a family adds to plain text. Made once for a tokenizer, by what its `chat_format` gives to `TemplateChatFormat`."""

    marks: Marks
    reasoning: ReasoningMarks | None = None
    calls: CallSyntax | None = None


SyntaxOf = Callable[[Marks], ChatSyntax]
"""Makes a family's syntax for a tokenizer."""


def reasoning_marks(marks: Marks, opening: str, closing: str, label: str = "") -> ReasoningMarks:
    """Thinking between two marks; it may begin anywhere if the opening one is a special token."""
    return ReasoningMarks(
        opening,
        closing,
        marks(opening),
        marks(closing),
        marks.token_id(opening),
        marks.token_id(closing),
        anywhere=marks.is_special(opening),
        label=label,
    )


def argument_types(tools: Tools, name: str) -> ArgumentTypes:
    """Declared types of a tool's arguments; none for a tool that the request did not have."""
    return ArgumentTypes(tools[name].parameters if name in tools else None)


def mark_expression(builder: LarkBuilder, marks: Marks, written: str) -> str:
    """A mark in a grammar: its token where it is special, else its text."""
    token_id = marks.token_id(written)
    return builder.token(token_id) if token_id is not None and marks.is_special(written) else builder.text(written)
