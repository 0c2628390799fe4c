"""Messages to prompt: the chat template of a checkpoint, rendered as transformers would.

Owns `ChatFormat`, which a family overrides for its own tool and reasoning syntax. Knows nothing of HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pegainfer_core.chat_history import for_plain_template, normal_calls, wrap_odd_arguments
from pegainfer_core.chat_syntax import ChatSyntax, Marks, SyntaxOf
from pegainfer_core.chat_template import ChatTemplate, find_templates
from pegainfer_core.errors import RequestError
from pegainfer_core.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""role, content, and whatever else the template reads (tool_calls, name, ...)."""

RESERVED_KWARGS = frozenset(
    {
        # arguments of `render`
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        # arguments of transformers' apply_chat_template that never reach a template
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
        # special tokens: the checkpoint's
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        "additional_special_tokens",
    }
)
"""Names that `template_kwargs` may not use."""

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class NoChatTemplateError(RequestError):
    """The checkpoint has no template for messages; it takes prompts only."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class ChatFormat(ABC):
    """How a family's messages become a prompt, and how its answers are to be read."""

    @property
    def syntax(self) -> ChatSyntax | None:
        """How thinking and tool calls are written; None: answers are plain text."""
        return None

    @abstractmethod
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
        """The prompt as text; `request_template` is used in place of the checkpoint's.

        Raises RequestError if the template refuses the messages or a kwarg is reserved, NoChatTemplateError if there is none.
        """

    def effort_kwargs(self, effort: str) -> Mapping[str, Any]:
        """`template_kwargs` with which the model thinks that much; "none" is not at all.

        Raises RequestError where the model cannot be asked for it.
        """
        if effort == "none" and not self.thinks:
            return {}
        raise RequestError("reasoning_effort: this model's thinking cannot be steered", param="reasoning_effort")

    @property
    def thinks(self) -> bool:
        """Whether answers may hold thinking."""
        return self.syntax is not None and self.syntax.reasoning is not None

    @abstractmethod
    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered prompt; adds no special tokens, because the template wrote them."""


class TemplateChatFormat(ChatFormat):
    """The checkpoint's own template: chat_template.jinja, else the one in tokenizer_config.json.

    The prompt is the one of transformers 5: keys that are null are left out of a message, reasoning is found under each of
    its names, special tokens are variables. One thing is more: content given as a list of text parts is joined, without
    a separator, for every template that takes strings (most drop or garble lists); a template that takes only
    lists gets lists.
    """

    def __init__(self, tokenizer: Tokenizer, path: Path, syntax: SyntaxOf | None = None) -> None:
        """Compile the templates of a checkpoint directory. Raises CheckpointError for one that is no jinja.

        `syntax`: how the family writes thinking and tool calls, one of `pegainfer_core.chat_syntax` or its own. A checkpoint without
        a template is fine until something is rendered.
        """
        self._syntax = None if syntax is None else syntax(Marks(tokenizer))
        self._tokenizer = tokenizer
        self._special_tokens = dict(tokenizer.special_tokens)
        self._templates = find_templates(path)

    @property
    def syntax(self) -> ChatSyntax | None:
        """See ChatFormat."""
        return self._syntax

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
        """See ChatFormat. `template_kwargs` may hold `documents`, a list of objects, and what the template reads."""
        if request_template is None:
            template = self._choose(with_tools=tools is not None)
        else:
            from pegainfer_core.isolated_template import IsolatedTemplate  # rare

            template = IsolatedTemplate(request_template, self._special_tokens)
        kwargs = self._checked_kwargs(template, template_kwargs or {})
        if not messages:
            raise RequestError("messages is empty; give at least one", param="messages")
        as_parts = template.wants_parts(self._special_tokens)
        messages, tools = self._for_template(template, messages, tools)
        chat = [_normal(message, as_parts) for message in messages]
        last = ""
        if continue_final_message:
            if add_generation_prompt:
                what = "continue_final_message and add_generation_prompt exclude each other"
                raise RequestError(what, param="continue_final_message")
            last = _mark_last(chat, template)
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": chat,
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = _run_repaired(template, variables, chat, "" if not as_parts else [])
        return _cut_after_last(rendered, last) if continue_final_message else rendered

    def effort_kwargs(self, effort: str) -> Mapping[str, Any]:
        """See ChatFormat: the template's own word for it, or its switch for thinking, which has no degrees."""
        read = self._choose(with_tools=False).variables
        if self.thinks and "reasoning_effort" in read:
            return {"reasoning_effort": effort}
        switches = [name for name in _THINKING_SWITCHES if name in read]
        if self.thinks and switches:
            return dict.fromkeys(switches, effort != "none")
        return super().effort_kwargs(effort)

    def encode(self, rendered: str) -> list[int]:
        """See ChatFormat."""
        return self._tokenizer.encode(rendered, add_special_tokens=False)

    def _for_template(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """What the template gets: calls as it needs them, and tools as text if it does not show them itself."""
        calls = None if self._syntax is None else self._syntax.calls
        _check(messages)
        messages = [
            {**message, "tool_calls": normal_calls(message["tool_calls"])} if message.get("tool_calls") else message
            for message in messages
        ]
        if calls is not None:
            messages = calls.history(messages)
        if "tools" in template.variables or template is self._templates.get("tool_use"):
            return messages, tools
        if tools and (calls is None or calls.instructions(tools) is None):
            raise RequestError("tools: this model's chat template does not show tools to the model", param="tools")
        if calls is None or "tool_calls" in template.source:
            return messages, None
        return for_plain_template(messages, tools, calls), None

    def _choose(self, *, with_tools: bool) -> ChatTemplate:
        """As transformers: `tool_use` for a request with tools where there is one, else `default`."""
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise NoChatTemplateError(
                f"this model has chat templates ({names}) but no default one; it completes prompts only"
            )
        raise NoChatTemplateError("this model has no chat template; it completes prompts only")

    def _checked_kwargs(self, template: ChatTemplate, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        reserved = RESERVED_KWARGS | self._special_tokens.keys()
        for name in kwargs:
            if name in reserved:
                raise RequestError(f"chat_template_kwargs: {name} is reserved", param="chat_template_kwargs")
        read = template.variables - reserved
        for name in kwargs:
            if name not in read:
                names = ", ".join(sorted(read)) or "none"
                what = f"chat_template_kwargs: this model's template does not read {name}; it reads {names}"
                raise RequestError(what, param="chat_template_kwargs")
        return {name: _plain(value, f"chat_template_kwargs.{name}") for name, value in kwargs.items()}


def _run_repaired(template: ChatTemplate, variables: Mapping[str, Any], chat: list[dict[str, Any]], empty: Any) -> str:
    """Clients send assistant messages that only call tools with content null, and a model's broken arguments come back as they were.
    Where a template fails on them, as transformers hands them over, it gets an empty content, and an object that holds the arguments.
    """
    try:
        return _run(template, variables)
    except RequestError:
        bare = [message for message in chat if message.get("role") == "assistant" and "content" not in message]
        for message in bare:
            message["content"] = empty
        wrapped = wrap_odd_arguments(chat)
        if not bare and not wrapped:
            raise
        return _run(template, variables)


def _run(template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except RequestError:  # of a template in a process of its own
        raise
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refuses this request: {error}", param="messages") from error
    except Exception as error:  # an expression of the template that the messages do not fit
        what = f"the chat template cannot render these messages: {type(error).__name__}: {error}"
        raise RequestError(what, param="messages") from error


# messages


def _check(messages: Sequence[Message]) -> None:
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message is an object, not {type(message).__name__}", param="messages")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise RequestError("the tool_calls of a message are a list of objects", param="messages")


def _normal(message: Message, as_parts: bool) -> dict[str, Any]:
    """A message as templates get it: plain data, no nulls, content in the form they take, reasoning under its names."""
    normal = {str(key): _plain(value, "messages") for key, value in message.items() if value is not None}
    if "content" in normal:
        text = _content_text(normal["content"])
        normal["content"] = [{"type": "text", "text": text}] if as_parts else text
    reasoning = next((normal[field] for field in _REASONING_FIELDS if field in normal), None)
    if reasoning is not None:
        normal = {"thinking": reasoning, **normal, "reasoning_content": reasoning}
    return normal


def _content_text(content: Any) -> str:
    """A string, or text parts joined without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("the content of a message is a text or a list of parts", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise RequestError(f"content parts of type {kind!r} are not supported; 'text' is", param="messages")
        if not isinstance(part.get("text"), str):
            raise RequestError("a content part of type 'text' needs a text", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types alone: templates are foreign code and shall see no other object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise RequestError(f"{where} holds a {type(value).__name__}, which is no JSON value", param=where.partition(".")[0])


# continuing the last message


def _mark_last(chat: list[dict[str, Any]], template: ChatTemplate) -> str:
    """Put a mark after the last message's text; returns that text."""
    content = chat[-1].get("content")
    if content is None:
        what = "continue_final_message is set but the last message has no content to continue"
        raise RequestError(what, param="continue_final_message")
    if "content" not in template.source:
        what = "continue_final_message is set but this model's template shows no content"
        raise RequestError(what, param="continue_final_message")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    text: str = content[0]["text"]
    content[0]["text"] = text + _CONTINUE_MARK
    return text


def _cut_after_last(rendered: str, last: str) -> str:
    """The prompt up to the mark; without it the template left the message, or its end, out."""
    mark = _CONTINUE_MARK.strip()
    if last.strip() not in rendered or mark not in rendered:
        what = "continue_final_message is set but the last message does not appear in the rendered prompt"
        raise RequestError(what, param="continue_final_message")
    end = rendered.rindex(mark)
    kept_spacing = rendered[end:].startswith(_CONTINUE_MARK)
    return rendered[:end] if kept_spacing else rendered[:end].rstrip()
