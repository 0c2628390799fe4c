"""An Anthropic request as the chat request that it is: blocks to messages, tools and thinking to their chat form.

Owns the translation of inputs. Every key of a block is read or refused by name. Knows nothing of answers.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pegainfer_server.http_errors import ApiError, bad_request
from pegainfer_server.messages_api.body import CountBody, MessagesBody

Part = dict[str, Any]
"""What this API calls a block, or any other JSON object."""


def chat_fields(body: CountBody, *, thinks: bool) -> dict[str, Any]:
    """The fields of a `ChatBody` that make the prompt; `thinks`: whether the model does.

    Raises ApiError naming the part that is wrong.
    """
    fields: dict[str, Any] = {"messages": _messages(body)}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if fields["messages"][-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    if body.output_config is not None and body.output_config.format is not None:
        named = {"name": "output", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields | _thinking(body, thinks)


def generation_fields(body: MessagesBody, *, thinks: bool) -> dict[str, Any]:
    """All fields of a `ChatBody`."""
    fields = chat_fields(body, thinks=thinks) | {"stream": body.stream, "max_completion_tokens": body.max_tokens}
    fields |= body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
    fields["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        fields["user"] = body.metadata.user_id
    return fields


# options


def _tool(tool: Any, where: str) -> Part:
    kind = tool.get("type") or "custom" if isinstance(tool, dict) else None
    if kind != "custom":
        raise _unsupported(f"{where}.type", f"only tools of type 'custom' are supported, got {kind!r}")
    given = _read(tool, where, {"type", "name", "description", "input_schema", "strict", "cache_control"})
    function = {key: given[key] for key in ("name", "description", "strict") if key in given}
    return {"type": "function", "function": function | {"parameters": given.get("input_schema", {})}}


def _tool_choice(choice: Any) -> Part:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise _unsupported("tool_choice.type", f"must be auto, any, tool or none, got {kind!r}")
    given = _read(choice, "tool_choice", {"type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])})
    named = {"type": "function", "function": {"name": given.get("name")}}
    fields = {"tool_choice": {"any": "required", "tool": named}.get(kind, kind)}
    return fields | ({"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") is True else {})


def _thinking(body: CountBody, thinks: bool) -> Part:
    """Whether to think, and how much. Without a word about it the model does what it does by itself."""
    thinking = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    if thinking is not None and thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    if not thinks:
        if effort is not None:
            raise _unsupported("output_config.effort", "this model does not think")
        return {}  # a bound on thinking holds anyway
    if thinking is None:
        return {} if effort is None else {"reasoning_effort": effort}
    budget = {} if thinking.budget_tokens is None else {"thinking_budget": thinking.budget_tokens}
    return {"reasoning_effort": effort or "medium", **budget}


# messages


def _messages(body: CountBody) -> list[Part]:
    if not isinstance(body.messages, list) or not body.messages:
        raise bad_request("messages: must be a list of at least one message", "messages", "invalid_value")
    messages: list[Part] = []
    if body.system is not None:
        parts = _parts(body.system, "system")
        text = "\n\n".join(_text(part, f"system[{index}]") for index, part in enumerate(parts))
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise bad_request(f"{where}: must be an object", where, "invalid_value")
        given = _read(message, where, {"role", "content"})
        parts = _parts(given.get("content"), f"{where}.content")
        if given.get("role") == "user":
            messages.extend(_user(parts, f"{where}.content"))
        elif given.get("role") == "assistant":
            messages.append(_assistant(parts, f"{where}.content"))
        else:
            wanted = f"must be user or assistant, got {given.get('role')!r}"
            raise bad_request(f"{where}.role: {wanted}", f"{where}.role", "invalid_value")
    return messages


def _user(parts: list[Part], where: str) -> list[Part]:
    """Tool results are messages of their own; the texts between them are the user's."""
    if not parts:
        raise bad_request(f"{where}: must not be empty", where, "invalid_value")
    messages: list[Part] = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if part.get("type") == "tool_result":
            messages.append(_result(part, place))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += _text(part, place)
        else:
            messages.append({"role": "user", "content": _text(part, place)})
    return messages


def _result(part: Part, where: str) -> Part:
    given = _read(part, where, {"type", "tool_use_id", "content", "is_error", "cache_control"})
    parts = _parts(given.get("content", ""), f"{where}.content")
    text = "".join(_text(inner, f"{where}.content[{index}]") for index, inner in enumerate(parts))
    failed = "Error: " if given.get("is_error") is True else ""  # templates have no other place for it
    return {"role": "tool", "tool_call_id": _string(given, "tool_use_id", where), "content": failed + text}


def _assistant(parts: list[Part], where: str) -> Part:
    content, thinking = "", ""
    calls: list[Part] = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if part.get("type") == "thinking":
            thinking += _string(_read(part, place, {"type", "thinking", "signature"}), "thinking", place)
        elif part.get("type") == "tool_use":
            calls.append(_call(part, place))
        else:
            content += _text(part, place)
    message: Part = {"role": "assistant", "content": content if content or not calls else None}
    return message | ({"reasoning_content": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})


def _call(part: Part, where: str) -> Part:
    given = _read(part, where, {"type", "id", "name", "input", "cache_control"})
    function = {
        "name": _string(given, "name", where),
        "arguments": json.dumps(given.get("input", {}), ensure_ascii=False),
    }
    return {"id": _string(given, "id", where), "type": "function", "function": function}


def _parts(content: Any, where: str) -> list[Part]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(f"{where}: must be a text or a list of blocks", where, "invalid_value")
    return content


def _text(part: Part, where: str) -> str:
    if part.get("type") != "text":
        raise _unsupported(where, f"blocks of type {part.get('type')!r} are not supported here")
    return _string(_read(part, where, {"type", "text", "cache_control"}), "text", where)


def _read(part: Part, where: str, known: Collection[str]) -> Part:
    """The part without nulls. Raises ApiError for a key that nobody reads."""
    given = {key: value for key, value in part.items() if value is not None}
    for key in given:
        if key not in known and given[key] != []:  # clients send back empty lists that answers held
            raise _unsupported(f"{where}.{key}", "this server does not support this field")
    return given


def _string(part: Part, key: str, where: str) -> str:
    value = part.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{key}: must be a text, got {value!r}"[:200], f"{where}.{key}", "invalid_value")
    return value


def _unsupported(where: str, reason: str) -> ApiError:
    return bad_request(f"{where}: {reason}", where, "unsupported_field")
