"""The messages of a chat request: checked, and brought into the form that chat templates read.

Owns what a message may hold. Text parts are joined without anything between them; the role developer, which templates do not know,
becomes system; several system messages at the beginning become one, because many templates take no more. What else a message carries
(name, tool_calls, reasoning_content, ...) reaches the template as it was sent.
"""

from __future__ import annotations

from typing import Any

from pegainfer_server.http_errors import ApiError, bad_request

ROLES = ("system", "developer", "user", "assistant", "tool")
PASSED_ON = frozenset({"name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"})


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages for `ChatFormat.render`. Raises ApiError naming the part that is wrong."""
    if not isinstance(value, list) or not value:
        raise bad_request("messages: must be a list of at least one message", "messages", "invalid_value")
    return _with_one_leading_system([_message(item, f"messages[{index}]") for index, item in enumerate(value)])


def _with_one_leading_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    first = {**messages[0], "content": "\n\n".join(message["content"] for message in messages[:count])}
    return [first, *messages[count:]]


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise bad_request(f"{where}: must be an object", where, "invalid_value")
    fields = {name: value for name, value in item.items() if value is not None}
    role = fields.pop("role", None)
    if role not in ROLES:
        raise bad_request(
            f"{where}.role: must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role", "invalid_value"
        )
    content = fields.pop("content", None)
    if content is None and not (role == "assistant" and fields.get("tool_calls")):
        needs = "; an assistant message may do without it beside tool_calls only" if role == "assistant" else ""
        raise bad_request(f"{where}.content: this field is required{needs}", f"{where}.content", "missing_field")
    if "tool_calls" in fields:
        _check_calls(fields["tool_calls"], f"{where}.tool_calls")
    for name, given in fields.items():
        if name not in PASSED_ON and given != []:  # clients send back empty lists that answers held
            raise _unsupported(f"{where}.{name}", "this server does not support this field")
    kept = {name: given for name, given in fields.items() if name in PASSED_ON}
    return {"role": "system" if role == "developer" else role, "content": _text(content, f"{where}.content"), **kept}


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise bad_request(f"{where}: must be a list", where, "invalid_value")
    for index, call in enumerate(calls):
        field = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise bad_request(f"{field}: must be an object", field, "invalid_value")
        if call.get("type", "function") != "function":
            raise _unsupported(f"{field}.type", f"must be 'function', got {call['type']!r}")
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{field}.function: must have a name", f"{field}.function", "invalid_value")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | dict):
            what = f"{field}.function.arguments: must be a string, the text of a JSON object"
            raise bad_request(what, f"{field}.function.arguments", "invalid_value")


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: must be a string or a list of text parts", where, "invalid_value")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where}: must be an object", where, "invalid_value")
    kind = part.get("type")
    if kind != "text":
        raise _unsupported(where, f"parts of type {kind!r} are not supported; this model reads text")
    text = part.get("text")
    if not isinstance(text, str) or set(part) - {"type", "text"}:
        raise bad_request(f'{where}: a text part is {{"type": "text", "text": "..."}}', where, "invalid_value")
    return text


def _unsupported(where: str, reason: str) -> ApiError:
    return bad_request(f"{where}: {reason}", where, "unsupported_field")
