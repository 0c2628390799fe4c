"""Messages to prompt ids, through the checkpoint's chat template; shared by the chat routes and /tokenize.

Owns the rules about how a prompt may end. Rendering itself is `pegainfer_core.chat`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.chat import ChatFormat, NoChatTemplateError
from pegainfer_core.chat_history import count_calls
from pegainfer_core.chat_syntax import Start, start_after
from pegainfer_core.messages import EngineInfo
from pegainfer_core.tokenizer import Tokenizer

from pegainfer_server.body import BYTES_READ_PER_CHARACTER
from pegainfer_server.chat_messages import read_messages
from pegainfer_server.http_errors import bad_request
from pegainfer_server.prompts import LARGE_SIZE, off_loop
from pegainfer_server.protocol import ChatBody, TokenizeBody


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered dialogue."""

    ids: list[int]
    start: Start
    """Where it leaves the model: thinking, answering or free to choose."""
    num_calls: int
    """Tool calls in the dialogue."""


async def encode_chat(
    body: ChatBody | TokenizeBody,
    chat_format: ChatFormat | None,
    tokenizer: Tokenizer,
    info: EngineInfo,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    trust_template: bool,
) -> ChatPrompt:
    """The prompt of `body.messages`; `tools`: what the template shows of them; `trust_template`: may the request bring its own?

    Raises ApiError, or RequestError where the template refuses the messages or they are far longer than the context.
    """
    if chat_format is None:
        raise bad_request(
            "messages: this model has no chat template; use /v1/completions", "messages", "unsupported_field"
        )
    if body.chat_template is not None and not trust_template:
        raise bad_request(
            "chat_template: templates of requests are refused; --trust-request-chat-template takes them",
            "chat_template",
            "unsupported_field",
        )
    messages = await off_loop(body.num_bytes // BYTES_READ_PER_CHARACTER, lambda: read_messages(body.messages))
    add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message:
        _check_continued(messages, add_generation_prompt)
        add_generation_prompt = False

    kwargs = dict(body.chat_template_kwargs)
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        kwargs = {**chat_format.effort_kwargs(body.reasoning_effort), **kwargs}

    def encode() -> ChatPrompt:
        rendered = chat_format.render(
            messages,
            tools=tools,
            add_generation_prompt=True if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=kwargs,
            request_template=body.chat_template,
        )
        tokenizer.check_length(rendered, info.max_model_len, "messages")
        syntax, continued = chat_format.syntax, messages[-1]["content"] if body.continue_final_message else None
        start: Start = "answer" if syntax is None else start_after(syntax, rendered, continued)
        return ChatPrompt(chat_format.encode(rendered), start, count_calls(messages))

    try:
        # a request's own template runs in a process, which is waited for
        prompt = await off_loop(body.num_bytes if body.chat_template is None else LARGE_SIZE, encode)
    except NoChatTemplateError as error:
        raise bad_request(f"messages: {error}; use /v1/completions", "messages", "unsupported_field") from None
    if not prompt.ids:
        raise bad_request("messages: the rendered prompt is empty", "messages", "invalid_value")
    return prompt


def _check_continued(messages: list[dict[str, Any]], add_generation_prompt: bool | None) -> None:
    if add_generation_prompt:
        raise bad_request(
            "continue_final_message: excludes add_generation_prompt", "continue_final_message", "invalid_value"
        )
    if messages[-1]["role"] != "assistant":
        raise bad_request(
            "continue_final_message: the last message must be the assistant's",
            "continue_final_message",
            "invalid_value",
        )
