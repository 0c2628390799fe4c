"""How models write thinking and tool calls, and the incremental machines that read it.

A family names its syntax: one of the functions below, or a `ChatSyntax` of its own made from `CallSyntax` and `reasoning_marks`.
"""

from __future__ import annotations

from pegainfer_core.chat_syntax.gemma_calls import GemmaCalls
from pegainfer_core.chat_syntax.glm_calls import GlmCalls
from pegainfer_core.chat_syntax.json_calls import JsonCalls
from pegainfer_core.chat_syntax.kimi_calls import KimiCalls
from pegainfer_core.chat_syntax.marks import Marks
from pegainfer_core.chat_syntax.parser import AnswerParser, ParserSettings, Start, start_after
from pegainfer_core.chat_syntax.syntax import (
    CallSink,
    CallSyntax,
    ChatSyntax,
    ReasoningMarks,
    SyntaxOf,
    Tool,
    reasoning_marks,
)
from pegainfer_core.chat_syntax.xml_calls import XmlCalls

__all__ = [
    "AnswerParser",
    "CallSink",
    "CallSyntax",
    "ChatSyntax",
    "GemmaCalls",
    "GlmCalls",
    "JsonCalls",
    "KimiCalls",
    "Marks",
    "ParserSettings",
    "ReasoningMarks",
    "Start",
    "SyntaxOf",
    "Tool",
    "XmlCalls",
    "gemma_syntax",
    "glm_syntax",
    "hermes_syntax",
    "kimi_syntax",
    "qwen_json_syntax",
    "qwen_xml_syntax",
    "reasoning_marks",
    "start_after",
]


def hermes_syntax(marks: Marks) -> ChatSyntax:
    """JSON calls, no thinking: Hermes, Qwen2.5, SmolLM2."""
    return ChatSyntax(marks, None, JsonCalls(marks))


def qwen_json_syntax(marks: Marks) -> ChatSyntax:
    """JSON calls and <think>: Qwen3."""
    return ChatSyntax(marks, reasoning_marks(marks, "<think>", "</think>"), JsonCalls(marks))


def qwen_xml_syntax(marks: Marks) -> ChatSyntax:
    """XML calls and <think>: Qwen3-Coder, Qwen3.5."""
    return ChatSyntax(marks, reasoning_marks(marks, "<think>", "</think>"), XmlCalls(marks))


def glm_syntax(marks: Marks) -> ChatSyntax:
    """GLM-4.5 to GLM-5."""
    return ChatSyntax(marks, reasoning_marks(marks, "<think>", "</think>"), GlmCalls(marks))


def kimi_syntax(marks: Marks) -> ChatSyntax:
    """Kimi K2 and its thinking versions."""
    return ChatSyntax(marks, reasoning_marks(marks, "<think>", "</think>"), KimiCalls(marks))


def gemma_syntax(marks: Marks) -> ChatSyntax:
    """Gemma 4: thinking is a channel named thought."""
    return ChatSyntax(marks, reasoning_marks(marks, "<|channel>", "<channel|>", "thought"), GemmaCalls(marks))
