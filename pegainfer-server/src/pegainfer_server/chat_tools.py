"""The tools of a chat request: which functions the model may call, must call, and how many calls an answer may hold.

Owns the fields tools, tool_choice and parallel_tool_calls. How calls are written is the family's `CallSyntax`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer_core.chat_syntax import CallSyntax, Tool
from pegainfer_core.structured import Grammar, LarkBuilder, calls_expression

from pegainfer_server.http_errors import ApiError, bad_request

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_FUNCTION_FIELDS = {"name": str, "description": str, "parameters": dict, "strict": bool}
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request says about tools."""

    shown: Sequence[Mapping[str, Any]] | None = None
    """What the template gets."""
    tools: Mapping[str, Tool] | None = None
    """By name. None: calls are not looked for in the answer."""
    forced: Sequence[Tool] = ()
    """One of these must be called."""
    named: bool = False
    """Whether the request named the one to call."""
    max_calls: int | None = None

    def grammar(self, syntax: CallSyntax, text: Grammar | None, *, after_thinking: bool) -> Grammar | None:
        """What the answer must be: calls if they are forced, calls or `text` if that is asked for, else anything.

        Raises RequestError for schemas that are too large, and for two demands that exclude each other.
        """
        if text is None and not self.forced:
            return None
        if text is not None and self.forced:
            what = f"tool_choice: excludes {text.field}: an answer that must be a call has no other form"
            raise bad_request(what, "tool_choice", "invalid_value")
        builder = LarkBuilder()
        may_call = self.forced or list((self.tools or {}).values())
        before, after = syntax.around_forced(builder)
        if after_thinking:  # models put an empty line there
            before = builder.pattern("\n{0,2}") + f" {before}"
        calls = calls_expression(
            builder,
            [syntax.forced(builder, tool) for tool in may_call],
            parallel=self.max_calls != 1,
            before=before,
            separator=syntax.separator,
            after=after,
        )
        if text is None:
            return builder.build(calls, field="tools")
        return builder.build(builder.any_of([calls, builder.expression(text)]), field=text.field)


NO_TOOLS = ToolUse()


def read_tools(tools: Any, choice: Any, *, parallel: bool, syntax: CallSyntax | None) -> ToolUse:
    """The three fields of a request. Raises ApiError naming the part that is wrong."""
    known = _read_list(tools)
    wanted = ("auto" if known else "none") if choice is None else choice
    named = _named(wanted)
    if named is None and wanted not in ("none", "auto", "required"):
        raise bad_request(f"tool_choice: must be {_CHOICES}", "tool_choice", "invalid_value")
    if wanted == "none" or (wanted == "auto" and not known):
        return NO_TOOLS
    if not known:
        raise bad_request("tool_choice: needs tools to choose from", "tool_choice", "invalid_value")
    if named is not None and named not in known:
        raise bad_request(f"tool_choice: tools has no function {named!r}", "tool_choice", "invalid_value")
    if syntax is None:
        raise _unsupported("tools", "this model's family does not say how it calls tools")
    forced = [known[named]] if named is not None else list(known.values()) if wanted == "required" else []
    return ToolUse(
        shown=tools,
        tools=known,
        forced=forced,
        named=named is not None,
        max_calls=None if parallel and named is None else 1,
    )


def _named(choice: Any) -> str | None:
    """The function that a tool_choice object names; None for anything that is no object."""
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict) or set(function) != {"name"}:
        raise bad_request(f"tool_choice: must be {_CHOICES}", "tool_choice", "invalid_value")
    if set(choice) != {"type", "function"} or not isinstance(function["name"], str):
        raise bad_request(f"tool_choice: must be {_CHOICES}", "tool_choice", "invalid_value")
    name: str = function["name"]
    return name


def _read_list(tools: Any) -> dict[str, Tool]:
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise bad_request("tools: must be a list", "tools", "invalid_value")
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS} are supported, got {len(tools)}", "tools", "invalid_value")
    known: dict[str, Tool] = {}
    for index, item in enumerate(tools):
        tool = _read_tool(item, f"tools[{index}]")
        if tool.name in known:
            raise bad_request(f"tools[{index}]: a second function {tool.name!r}", "tools", "invalid_value")
        known[tool.name] = tool
    return known


def _read_tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict):
        raise bad_request(f"{where}: must be an object", where, "invalid_value")
    if item.get("type") != "function":
        raise _unsupported(f"{where}.type", f"must be 'function', got {item.get('type')!r}")
    for name in item.keys() - {"type", "function"}:
        raise _unsupported(f"{where}.{name}", "this server does not support this field")
    function = item.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function: must be an object", f"{where}.function", "invalid_value")
    for name, value in function.items():
        if name not in _FUNCTION_FIELDS:
            raise _unsupported(f"{where}.function.{name}", "this server does not support this field")
        if value is not None and not isinstance(value, _FUNCTION_FIELDS[name]):
            field = f"{where}.function.{name}"
            raise bad_request(f"{field}: must be of type {_FUNCTION_FIELDS[name].__name__}", field, "invalid_value")
    name = function.get("name")
    if name is None or _NAME.fullmatch(name) is None:
        field = f"{where}.function.name"
        raise bad_request(f"{field}: must be 1 to 256 letters, digits or any of _ . : / -", field, "invalid_value")
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object" or not isinstance(parameters.get("properties", {}), dict):
        field = f"{where}.function.parameters"
        raise bad_request(f"{field}: must be the JSON schema of an object", field, "invalid_value")
    return Tool(name, parameters, bool(function.get("strict")))


def _unsupported(where: str, reason: str) -> ApiError:
    return bad_request(f"{where}: {reason}", where, "unsupported_field")
