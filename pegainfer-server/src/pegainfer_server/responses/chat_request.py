"""A Responses request as the chat request that it is: items to messages, tools and formats to their chat form.

Owns the translation of inputs. Every key of an item is read or refused by name. Knows nothing of answers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection
from typing import Any

from pegainfer_server.http_errors import ApiError, bad_request
from pegainfer_server.protocol import SamplingFields
from pegainfer_server.responses.body import ResponsesBody, TextFormat

Item = dict[str, Any]

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and where it lies."""
_PART_KEYS = {"type", "annotations", "logprobs"}


def chat_fields(body: ResponsesBody, *, thinks: bool) -> dict[str, Any]:
    """The fields of a `ChatBody`; `thinks`: whether the model does. Raises ApiError naming the part that is wrong."""
    fields = body.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)
    fields["messages"] = _messages(body)
    fields["stream"] = body.stream
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None and body.reasoning.effort is not None:
        if not thinks and body.reasoning.effort != "none":
            raise _unsupported("reasoning.effort", "this model does not think")
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return fields


def hidden_thinking(text: str) -> str:
    """Thinking as `encrypted_content`: opaque to clients, and understood when they send it back."""
    return base64.b64encode(text.encode()).decode()


def _shown_thinking(content: Any, where: str) -> str:
    try:
        return base64.b64decode(content, validate=True).decode()
    except (TypeError, ValueError, binascii.Error):
        raise bad_request(f"{where}: not an encrypted_content of this server", where, "invalid_value") from None


# tools and formats


def _tool(tool: Any, where: str) -> Item:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise _unsupported(f"{where}.type", f"only tools of type 'function' are supported, got {kind!r}")
    given = _read(tool, where, {"type", "name", "description", "parameters", "strict"})
    return {"type": "function", "function": {key: value for key, value in given.items() if key != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _read(choice, "tool_choice", {"type", "name"}).get("name")
        return {"type": "function", "function": {"name": name}}
    raise _unsupported("tool_choice", 'must be "auto", "none", "required" or {"type": "function", "name": ...}')


def _response_format(text_format: TextFormat) -> Item:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    named = text_format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": named}


# items


def _messages(body: ResponsesBody) -> list[Item]:
    history = History()
    if body.instructions is not None:
        history.say("system", body.instructions)
    if isinstance(body.input, str):
        history.say("user", body.input)
    elif isinstance(body.input, list) and body.input:
        for index, item in enumerate(body.input):
            _add(history, item, f"input[{index}]")
    else:
        raise bad_request("input: must be a text, or a list of at least one item", "input", "invalid_value")
    return history.messages


class History:
    """Messages under construction. What an assistant thought, said and called in one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[Item] = []

    def say(self, role: str, text: str) -> None:
        """A message, or the text of the assistant's one whose thinking came before."""
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Thinking, which begins an assistant's message."""
        self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        function = {"name": name, "arguments": arguments}
        self.messages[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a tool answered."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _add(history: History, item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise bad_request(f"{where}: must be an object", where, "invalid_value")
    kind = item.get("type", "message")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        names = ", ".join(_READERS)
        raise _unsupported(f"{where}.type", f"items of type {kind!r} are not supported; {names} are")
    reader(history, item, where)


def _add_message(history: History, item: Item, where: str) -> None:
    given = _read(item, where, {"type", "role", "content", "id", "status", "phase"})
    role = given.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        wanted = "must be user, assistant, system or developer"
        raise bad_request(f"{where}.role: {wanted}, got {role!r}", f"{where}.role", "invalid_value")
    history.say(role, _text(given.get("content"), f"{where}.content"))


def _add_call(history: History, item: Item, where: str) -> None:
    given = _read(item, where, {"type", "call_id", "name", "arguments", "id", "status"})
    history.call(*(_string(given, key, where) for key in ("call_id", "name", "arguments")))


def _add_result(history: History, item: Item, where: str) -> None:
    given = _read(item, where, {"type", "call_id", "output", "id", "status"})
    history.result(_string(given, "call_id", where), _text(given.get("output"), f"{where}.output"))


def _add_thinking(history: History, item: Item, where: str) -> None:
    given = _read(item, where, {"type", "id", "summary", "content", "encrypted_content", "status"})
    if given.get("content"):
        text = _joined(given["content"], f"{where}.content", {"reasoning_text": "text"})
    elif "encrypted_content" in given:
        text = _shown_thinking(given["encrypted_content"], f"{where}.encrypted_content")
    else:
        text = _joined(given.get("summary", []), f"{where}.summary", {"summary_text": "text"})
    if text:
        history.think(text)


_READERS: dict[str, Callable[[History, Item, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "reasoning": _add_thinking,
}


def _text(content: Any, where: str) -> str:
    return content if isinstance(content, str) else _joined(content, where, TEXT_PARTS)


def _joined(parts: Any, where: str, kinds: dict[str, str]) -> str:
    """The text of content parts, without anything between them."""
    if not isinstance(parts, list):
        raise bad_request(f"{where}: must be a text or a list of parts", where, "invalid_value")
    return "".join(_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(parts))


def _part(part: Any, where: str, kinds: dict[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise _unsupported(where, f"parts of type {kind!r} are not supported; {', '.join(kinds)} are")
    return _string(_read(part, where, {*_PART_KEYS, kinds[kind]}), kinds[kind], where)


def _read(item: Item, where: str, known: Collection[str]) -> Item:
    """The item without nulls. Raises ApiError for a key that nobody reads."""
    given = {key: value for key, value in item.items() if value is not None}
    for key in given:
        if key not in known:
            raise _unsupported(f"{where}.{key}", "this server does not support this field")
    return given


def _string(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{key}: must be a text, got {value!r}"[:200], f"{where}.{key}", "invalid_value")
    return value


def _unsupported(where: str, reason: str) -> ApiError:
    return bad_request(f"{where}: {reason}", where, "unsupported_field")
