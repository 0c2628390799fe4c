"""The grammars of forced calls in every syntax: whatever they allow is read back as calls that fit their tools."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from pegainfer_core import structured
from pegainfer_core.chat_events import ContentDelta, ToolArgumentsDelta, ToolCallStart
from pegainfer_core.chat_syntax import (
    AnswerParser,
    Marks,
    ParserSettings,
    SyntaxOf,
    Tool,
    gemma_syntax,
    glm_syntax,
    kimi_syntax,
    qwen_json_syntax,
    qwen_xml_syntax,
)
from pegainfer_core.grammars import Grammars
from pegainfer_core.structured import Grammar
from pegainfer_core.testing.tiny_chat import PLAIN_MARKS, tiny_chat_tokenizer
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from pegainfer_core.tokenizer import Detokenizer, Tokenizer
from pegainfer_server.chat_tools import ToolUse

GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI_MARKS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)
GEMMA_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
}
TOOLS = {"look": Tool("look", LOOK), "go": Tool("go")}
SYNTAXES: dict[str, tuple[SyntaxOf, tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (qwen_json_syntax, PLAIN_MARKS, ()),
    "hermes, spelled": (qwen_json_syntax, (), ()),
    "xml": (qwen_xml_syntax, PLAIN_MARKS, ()),
    "glm": (glm_syntax, GLM_MARKS, ()),
    "glm, special": (glm_syntax, (), GLM_MARKS),
    "kimi": (kimi_syntax, (), KIMI_MARKS),
    "gemma": (gemma_syntax, (), GEMMA_MARKS),
}


def walk(grammars: Grammars, grammar: Grammar, seed: int, most: int = 160) -> tuple[list[int], bool]:
    """Random tokens that the grammar allows, and whether they are a whole text of it. Closing tokens are preferred."""
    grammars.compile(grammar).result(60)
    matcher = grammars.matcher(grammar)
    choose = random.Random(seed)
    ids: list[int] = []
    while len(ids) < most and not matcher.is_stopped():
        if matcher.is_accepting() and choose.random() < 0.5:
            break
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = [
            int(token) for token in np.flatnonzero(np.unpackbits(words, bitorder="little")) if token < VOCAB_SIZE
        ]
        allowed = [token for token in allowed if token != EOS_ID]
        if not allowed:
            break
        closing = [token for token in allowed if token >= VOCAB_SIZE - 12]
        token = choose.choice(closing if closing and choose.random() < 0.3 else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return ids, matcher.is_accepting()


def check_arguments(name: str, arguments: Mapping[str, Any], syntax: str) -> None:
    assert isinstance(arguments, dict)
    if name == "look" and syntax != "gemma":
        jsonschema.validate(arguments, LOOK)
    elif name == "look":  # its grammar binds names and notation, not types
        assert set(LOOK["required"]) <= set(arguments) <= set(LOOK["properties"])


@pytest.mark.parametrize("name", SYNTAXES)
def test_what_a_forced_grammar_allows_is_read_as_calls(name: str) -> None:
    make, plain, special = SYNTAXES[name]
    tokenizer = Tokenizer(tiny_chat_tokenizer(plain, special))
    syntax = make(Marks(tokenizer))
    assert syntax.calls is not None
    grammars = Grammars(lambda: tokenizer, VOCAB_SIZE, frozenset({EOS_ID}))
    complete = 0
    for forced in ([TOOLS["look"]], [TOOLS["go"]], list(TOOLS.values())):
        use = ToolUse(tools=TOOLS, forced=forced, max_calls=1 if len(forced) == 1 else None)
        grammar = use.grammar(syntax.calls, None, after_thinking=len(forced) > 1)
        assert grammar is not None
        for seed in range(12):
            ids, whole = walk(grammars, grammar, seed)
            parser = AnswerParser(syntax, ParserSettings(start="answer", tools=TOOLS))
            detokenizer = Detokenizer(tokenizer, marks=syntax.marks.by_id)
            events = parser.push(detokenizer.push(ids) + detokenizer.flush()) + parser.finish(cut=not whole)
            assert not [event for event in events if isinstance(event, ContentDelta) and event.text.strip()]
            if not whole:
                continue
            complete += 1
            names = [event.name for event in events if isinstance(event, ToolCallStart)]
            assert names and set(names) <= {tool.name for tool in forced}
            for index, called in enumerate(names):
                parts = [
                    event.text for event in events if isinstance(event, ToolArgumentsDelta) and event.index == index
                ]
                check_arguments(called, json.loads("".join(parts)), name)
    assert complete >= 12, "most walks end"


def test_a_format_beside_tools_allows_both() -> None:
    tokenizer = Tokenizer(tiny_chat_tokenizer())
    syntax = qwen_json_syntax(Marks(tokenizer))
    assert syntax.calls is not None
    grammars = Grammars(lambda: tokenizer, VOCAB_SIZE, frozenset({EOS_ID}))
    for text, example in (
        (structured.choice(["yes", "no"]), "yes"),
        (structured.regex("[0-9]{2}"), "42"),
        (structured.json_object(), '{"a": 1}'),
    ):
        grammar = ToolUse(tools=TOOLS).grammar(syntax.calls, text, after_thinking=False)
        assert grammar is not None
        grammars.compile(grammar).result(60)
        for answer in (example, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'):
            matcher = grammars.matcher(grammar)
            assert all(matcher.consume_token(token) for token in tokenizer.encode(answer)) and matcher.is_accepting()
        assert not grammars.matcher(grammar).consume_token(tokenizer.encode("<think>")[0])
