"""Tool calls and results of a dialogue, in the form that chat templates read.

Owns what is done for templates: arguments become objects, as templates were written for, and where a template knows nothing of tools
they become text. Knows nothing of HTTP. Messages are plain data and are changed in place only where they are this module's own copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pegainfer_core.chat_syntax.syntax import CallSyntax

ODD_ARGUMENTS = "arguments"
"""Key under which a template that needs an object finds arguments that are none."""


def normal_calls(calls: Any) -> Any:
    """Calls of an assistant's message with their arguments as objects, where they are the text of one; others stay as they are."""
    if not isinstance(calls, list):
        return calls
    return [_with_function(call, _as_object) for call in calls]


def functions_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The functions that the dialogue's calls name."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                yield call["function"]


def count_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many calls the dialogue has so far."""
    return sum(1 for _ in functions_of(messages))


def wrap_odd_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Arguments that are a text become an object that holds it; whether there were any."""
    odd = [function for function in functions_of(messages) if isinstance(function.get("arguments"), str)]
    for function in odd:
        function["arguments"] = {ODD_ARGUMENTS: function["arguments"]}
    return bool(odd)


def for_plain_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, calls: CallSyntax
) -> list[dict[str, Any]]:
    """The dialogue for a template that shows contents alone: tools described by the system message, calls and results as text."""
    result: list[dict[str, Any]] = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        written = [_written(function, calls) for function in functions_of([message])]
        if written:
            plain["content"] = "\n".join([*([plain["content"]] if plain.get("content") else []), *written])
        if message.get("role") == "tool":
            plain = {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
            if result and result[-1].get("from_tool"):
                result[-1]["content"] += "\n" + plain["content"]
                continue
            plain["from_tool"] = True
        result.append(plain)
    for plain in result:
        plain.pop("from_tool", None)
    instructions = calls.instructions(tools) if tools else None
    if instructions is None:
        return result
    if result and result[0].get("role") == "system":
        first = {**result[0], "content": f"{result[0].get('content') or ''}\n\n{instructions}"}
        return [first, *result[1:]]
    return [{"role": "system", "content": instructions}, *result]


def _written(function: Mapping[str, Any], calls: CallSyntax) -> str:
    return calls.written(str(function.get("name")), function.get("arguments", {}))


def _with_function(call: Any, change: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    return {**call, "function": {**call["function"], "arguments": change(call["function"].get("arguments"))}}


def _as_object(arguments: Any) -> Any:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
