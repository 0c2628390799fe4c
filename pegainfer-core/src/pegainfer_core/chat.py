"""Messages to prompt: the chat template of a checkpoint, rendered as transformers would.

Owns `ChatFormat`, which a family overrides for its own tool and reasoning syntax. Knows nothing of HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pegainfer_core.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""role, content, and whatever else the template reads (tool_calls, name, ...)."""


class ChatFormat(ABC):
    """How a family's messages become a prompt."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. Raises RequestError if the template refuses the messages or a kwarg is reserved."""

    @abstractmethod
    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered prompt; adds no special tokens, because the template wrote them."""


class TemplateChatFormat(ChatFormat):
    """The checkpoint's own template: chat_template.jinja, else the one in tokenizer_config.json."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """See ChatFormat."""
        raise NotImplementedError

    def encode(self, rendered: str) -> list[int]:
        """See ChatFormat."""
        raise NotImplementedError
