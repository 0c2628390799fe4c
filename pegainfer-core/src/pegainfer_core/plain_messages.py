"""Messages of users and tools in which control tokens stay the text they are spelled as.

Owns what is changed in a message: a word joiner, which nobody sees, breaks the spelling of every token that a checkpoint's
tokenizer finds in texts. Knows no template. What the assistant said is left alone: its marks are the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.chat import ChatFormat, Message
from pegainfer_core.chat_syntax import ChatSyntax
from pegainfer_core.tokenizer import Tokenizer

JOINER = "\u2060"
"""U+2060, a character without width at which nothing breaks."""
ROLES = frozenset({"user", "tool"})


class PlainMessages(ChatFormat):
    """A chat format whose users and tools cannot write control tokens."""

    def __init__(self, inner: ChatFormat, tokenizer: Tokenizer) -> None:
        self._inner = inner
        spellings = sorted(tokenizer.control_texts, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    @property
    def syntax(self) -> ChatSyntax | None:
        """See ChatFormat."""
        return self._inner.syntax

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        request_template: str | None = None,
    ) -> str:
        """See ChatFormat."""
        return self._inner.render(
            [self._plain(message) for message in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            request_template=request_template,
        )

    def encode(self, rendered: str) -> list[int]:
        """See ChatFormat."""
        return self._inner.encode(rendered)

    def _plain(self, message: Message) -> Message:
        if self._control is None or message.get("role") not in ROLES:
            return message
        return {name: value if name == "role" else self._broken(value) for name, value in message.items()}

    def _broken(self, value: Any) -> Any:
        """The same value with every spelling of a control token broken up, however deep it is."""
        if isinstance(value, Mapping):
            return {name: self._broken(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._broken(item) for item in value]
        if not isinstance(value, str):
            return value
        assert self._control is not None, "asked for only where there are control tokens"
        while self._control.search(value):  # breaking one may show another around it
            value = self._control.sub(lambda found: found[0][:1] + JOINER + found[0][1:], value)
        return value
