"""Machines for thinking and tool calls: every syntax on texts in its published form, whole and in every kind of pieces."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegainfer_core.chat_events import AnswerEvent, ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from pegainfer_core.chat_syntax import (
    AnswerParser,
    ChatSyntax,
    Marks,
    ParserSettings,
    Tool,
    gemma_syntax,
    glm_syntax,
    kimi_syntax,
    qwen_json_syntax,
    qwen_xml_syntax,
)
from pegainfer_core.chat_syntax.arguments import ArgumentTypes
from pegainfer_core.chat_syntax.parser import Start

SPECIAL = [
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
]


class Vocabulary:
    """Has the marks of Kimi and Gemma as special tokens, and those of the others as ordinary text."""

    special_ids = frozenset(range(len(SPECIAL)))

    def token_id(self, text: str) -> int | None:
        return SPECIAL.index(text) if text in SPECIAL else None


@dataclasses.dataclass
class Read:
    """Events of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = dataclasses.field(default_factory=list)
    """id, name, arguments"""
    order: list[str] = dataclasses.field(default_factory=list)

    def add(self, event: AnswerEvent) -> None:
        kind = type(event).__name__
        if not self.order or self.order[-1] != kind:
            self.order.append(kind)
        if isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(self.calls)
            self.calls.append([event.id, event.name, ""])
        elif isinstance(event, ToolArgumentsDelta):
            assert event.index == len(self.calls) - 1
            self.calls[-1][2] += event.text

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
)
TOOLS = {"get_weather": WEATHER, "f": Tool("f")}


def pieces_of(syntax: ChatSyntax, text: str) -> str:
    """The text as the machine gets it: special tokens that are written out in it become what stands for them."""
    for mark in SPECIAL:
        text = text.replace(mark, syntax.marks(mark))
    return text


def read(
    make: Callable[[Marks], ChatSyntax],
    text: str,
    cuts: Sequence[int] = (),
    *,
    cut: bool = False,
    length: int | None = None,
    spelled: bool = False,
    tools: dict[str, Tool] | None = TOOLS,
    **settings: Any,
) -> Read:
    """Feed the text, cut at these places; `cut`: the model was stopped by max_tokens."""
    syntax = make(Marks(Vocabulary()))
    given = (text if spelled else pieces_of(syntax, text))[:length]
    parser = AnswerParser(syntax, ParserSettings(tools=tools, **settings))
    result = Read()
    places = [0, *sorted({place % (len(given) + 1) for place in cuts}), len(given)]
    for begin, end in itertools.pairwise(places):
        for event in parser.push(given[begin:end]):
            result.add(event)
    for event in parser.finish(cut=cut):
        result.add(event)
    for call, number in zip(result.calls, range(len(result.calls)), strict=True):
        call[0] = call[0] if call[0].startswith("functions.") else f"id{number}"  # the others are random
    return result


# one syntax after the other: (maker, text, content, reasoning, calls)

HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, \\"FR\\"", "days": 3}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=metric>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call>"
)
GLM_CALL_LINES = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
KIMI_CALLS = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}'
    "<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
GEMMA_CALL = (
    '<|tool_call>call:get_weather{city:<|"|>Paris, {"FR"}\n<|"|>,days:3,metric:true,tags:[<|"|>a<|"|>,<|"|>b<|"|>],'
    "where:{lat:1.5,at:null}}<tool_call|>"
)
THOUGHT = "<think>\nThe user asks.\n\nSo I look.\n</think>\n\n"
CASES: dict[str, tuple[Callable[[Marks], ChatSyntax], str, str, str, list[tuple[str, Any]]]] = {
    "plain": (qwen_json_syntax, " Hello,\n world < 3 \n", " Hello,\n world < 3 \n", "", []),
    "hermes": (qwen_json_syntax, HERMES_CALL, "", "", [("get_weather", {"city": 'Paris, "FR"', "days": 3})]),
    "hermes all": (
        qwen_json_syntax,
        f'{THOUGHT}Let me see.\n{HERMES_CALL}\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>',
        "Let me see.",
        "The user asks.\n\nSo I look.",
        [("get_weather", {"city": 'Paris, "FR"', "days": 3}), ("f", {})],
    ),
    "hermes odd": (
        qwen_json_syntax,
        '<tool_call>[{"arguments": {"a": [1, {"b": "}"}]}, "id": 7, "name": "f"}, {"name":"f","parameters":"{\\"a\\": 1}"},'
        ' {"name": "f"}, {"name": "f", "arguments": null}}]</tool_call>',
        "",
        "",
        [("f", {"a": [1, {"b": "}"}]}), ("f", {"a": 1}), ("f", {}), ("f", {})],
    ),
    "hermes prose": (
        qwen_json_syntax,
        'Write <tool_call> {} and  <tool_call>{"x": 1}</tool_call> or </tool_call>',
        'Write <tool_call> {} and  <tool_call>{"x": 1}</tool_call> or </tool_call>',
        "",
        [],
    ),
    "xml": (
        qwen_xml_syntax,
        f"{THOUGHT}I will.\n\n{XML_CALL}\n{XML_CALL}",
        "I will.",
        "The user asks.\n\nSo I look.",
        [("get_weather", {"city": "Paris", "days": 3, "metric": True})] * 2,
    ),
    "xml values": (
        qwen_xml_syntax,
        '<function=get_weather><parameter=city>\n\n a</parameter> <b>\n\n</parameter>\n<parameter=tags>["x", 1]\n'
        '<parameter=days>\nmany\n</parameter><parameter=note>\nnull\n</parameter>\n<parameter=other>\n{"a": 1}\n</parameter>'
        "</function>",
        "",
        "",
        [
            (
                "get_weather",
                {"city": "\n a</parameter> <b>\n", "tags": ["x", 1], "days": "many", "note": None, "other": {"a": 1}},
            )
        ],
    ),
    "xml no arguments": (qwen_xml_syntax, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", "", [("f", {})]),
    "glm": (
        glm_syntax,
        f"{THOUGHT}{GLM_CALL}\n{GLM_CALL_LINES}",
        "",
        "The user asks.\n\nSo I look.",
        [("get_weather", {"city": "Paris", "days": 3})] * 2,
    ),
    "glm prose": (glm_syntax, "Use <tool_call> or <tool_call>f now.", "Use <tool_call> or <tool_call>f now.", "", []),
    "glm no arguments": (glm_syntax, "Ok.<tool_call>f</tool_call>", "Ok.", "", [("f", {})]),
    "kimi": (
        kimi_syntax,
        f"<think>Hm.</think>Two calls.{KIMI_CALLS}",
        "Two calls.",
        "Hm.",
        [("get_weather", {"city": "Paris"}), ("f", {})],
    ),
    "gemma": (
        gemma_syntax,
        f"<|channel>thought\nHm.\n<channel|>{GEMMA_CALL}",
        "",
        "Hm.",
        [
            (
                "get_weather",
                {
                    "city": 'Paris, {"FR"}\n',
                    "days": 3,
                    "metric": True,
                    "tags": ["a", "b"],
                    "where": {"lat": 1.5, "at": None},
                },
            )
        ],
    ),
    "gemma late thought": (
        gemma_syntax,
        "First.<|channel>thought\nThen.<channel|>Second.<|tool_call>call:f{}<tool_call|>",
        "First.Second.",
        "Then.",
        [("f", {})],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_in_the_published_form(name: str) -> None:
    """A31: arguments are the text of a JSON object."""
    make, text, content, reasoning, calls = CASES[name]
    result = read(make, text)
    assert (result.content, result.reasoning, result.parsed) == (content, reasoning, calls)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_of_one_size_change_nothing(name: str, size: int) -> None:
    """A34, A35: 1 character, 7 characters and the whole text give the same, argument fragments included."""
    make, text, *_ = CASES[name]
    assert read(make, text, range(0, len(text), size)) == read(make, text)


NOISE = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "thought",
        "call:f",
        '{"name": "f", "arguments": {',
        "}",
        "}}",
    ),
    *("{", "[", "]", ",", ":", '"', "\\", "\n", " ", "a", "<", "f", "functions.f:0", "\n\n", "</", *SPECIAL),
]


@given(
    st.sampled_from([qwen_json_syntax, qwen_xml_syntax, glm_syntax, kimi_syntax, gemma_syntax]),
    st.one_of(
        st.lists(st.sampled_from(NOISE), max_size=14).map("".join),
        st.sampled_from(sorted(CASES)).map(lambda name: CASES[name][1]),
        st.tuples(
            st.sampled_from(sorted(CASES)), st.integers(0, 200), st.lists(st.sampled_from(NOISE), max_size=3)
        ).map(lambda drawn: CASES[drawn[0]][1][: drawn[1]] + "".join(drawn[2]) + CASES[drawn[0]][1][drawn[1] :]),
    ),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.sampled_from(["undecided", "thinking", "mid-thought", "answer"]),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_any_split_of_any_text_gives_the_same(
    make: Callable[[Marks], ChatSyntax],
    text: str,
    cuts: list[int],
    cut: bool,
    start: Start,
    max_calls: int | None,
    with_tools: bool,
) -> None:
    """A34, A35, and no special token ever reaches the client (B7)."""
    options: dict[str, Any] = {
        "cut": cut,
        "start": start,
        "max_calls": max_calls,
        "tools": TOOLS if with_tools else None,
    }
    whole = read(make, text, **options)
    assert read(make, text, cuts, **options) == whole
    assert read(make, text, range(len(text)), **options) == whole
    told = whole.content + whole.reasoning + "".join(part for call in whole.calls for part in call)
    told.encode()  # raises for the characters that stand for special tokens
    assert len(whole.calls) <= (max_calls or 100)


@pytest.mark.parametrize("name", CASES)
def test_a_beginning_is_told_as_the_beginning_of_the_whole(name: str) -> None:
    """A43 and A12: cut off anywhere, content, reasoning and arguments are beginnings, and no unfinished mark is content."""
    make, text, *_ = CASES[name]
    whole = read(make, text)
    for length in range(len(text)):
        part = read(make, text, cut=True, length=length)
        assert whole.reasoning.startswith(part.reasoning)
        assert whole.content.startswith(part.content.rstrip("< \n"))
        assert len(part.calls) <= len(whole.calls)
        for got, full in zip(part.calls, whole.calls, strict=False):
            assert full[1] == got[1] and full[2].startswith(got[2])


# thinking


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("thinking", "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("thinking", "Hm. So", "Hm. So", ""),
        ("mid-thought", " and so.</think>Yes.", " and so.", "Yes."),
        ("answer", "<think>Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
        ("undecided", "\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("undecided", "Yes <think>", "", "Yes <think>"),
        ("undecided", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ],
)
def test_where_the_prompt_left_the_model(start: Start, text: str, reasoning: str, content: str) -> None:
    """A41, A42, A43."""
    result = read(qwen_json_syntax, text, start=start, cut=True)
    assert (result.reasoning, result.content) == (reasoning, content)


def test_a_call_ends_thinking_that_was_not_closed() -> None:
    for make, call in ((qwen_json_syntax, HERMES_CALL), (kimi_syntax, KIMI_CALLS), (qwen_xml_syntax, XML_CALL)):
        result = read(make, f"I call.\n{call}", start="thinking")
        assert result.reasoning == "I call." and result.calls and result.content == ""


def test_marks_that_are_spelled_out_are_text_where_the_tokenizer_has_special_tokens() -> None:
    """B10: only the model's own special tokens make a call."""
    result = read(kimi_syntax, KIMI_CALLS, spelled=True)
    assert result.content == KIMI_CALLS and not result.calls
    assert read(gemma_syntax, GEMMA_CALL, spelled=True).content == GEMMA_CALL


def test_special_tokens_of_no_meaning_are_left_out_or_shown() -> None:
    """B7."""
    text = "a<|tool_calls_section_end|>b"
    assert read(kimi_syntax, text).content == "ab"
    assert read(kimi_syntax, text, show_special=True).content == text


# calls


def test_without_tools_calls_are_text() -> None:
    assert read(qwen_json_syntax, HERMES_CALL, tools=None).content == HERMES_CALL


def test_kimi_ids_count_through_the_dialogue() -> None:
    """A36, A40."""
    result = read(kimi_syntax, KIMI_CALLS, calls_before=3)
    assert [call[0] for call in result.calls] == ["functions.get_weather:3", "functions.f:4"]


def test_kimi_history_gets_ids_in_the_models_form() -> None:
    """A40: foreign ids are rewritten, and results follow them."""
    syntax = kimi_syntax(Marks(Vocabulary()))
    assert syntax.calls is not None
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{**call, "id": "call_a"}, {**call, "id": "call_b"}]},
        {"role": "tool", "tool_call_id": "call_b", "content": "2"},
        {"role": "assistant", "tool_calls": [{**call, "id": "call_a"}]},
        {"role": "tool", "tool_call_id": "call_a", "content": "3"},
    ]
    result = syntax.calls.history(messages)
    assert [[made["id"] for made in result[place]["tool_calls"]] for place in (0, 2)] == [
        ["functions.f:0", "functions.f:1"],
        ["functions.f:2"],
    ]
    assert [result[place]["tool_call_id"] for place in (1, 3)] == ["functions.f:1", "functions.f:2"]
    assert messages[0]["tool_calls"][0]["id"] == "call_a"


def test_long_arguments_come_while_they_are_written() -> None:
    """A34, E29: more than any buffer of one kilobyte, told piece by piece."""
    syntax = qwen_json_syntax(Marks(Vocabulary()))
    parser = AnswerParser(syntax, ParserSettings(tools=TOOLS))
    (start,) = parser.push('<tool_call>{"name": "f", "arguments": ')
    assert isinstance(start, ToolCallStart)
    assert parser.push('{"a": "') == [ToolArgumentsDelta(0, '{"a": "')]
    assert [parser.push("x" * 10) for _ in range(500)] == [[ToolArgumentsDelta(0, "x" * 10)]] * 500


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "02134", "02134"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "1e5", "1e5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "30", 30),
        ({"type": "integer"}, "+30", 30),
        ({"type": "integer"}, "30.0", 30),
        ({"type": "integer"}, "thirty", "thirty"),
        ({"type": "number"}, "1e5", 1e5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "5"}, "5", "5"),
        ({"$ref": "#/$defs/Count"}, "5", 5),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "02134", "02134"),
        (True, "x", "x"),
    ],
)
def test_types_of_bare_arguments_come_from_the_schema(schema: Any, text: str, value: Any) -> None:
    """A39: strings stay strings, and what fits no type does not lose the call."""
    types = ArgumentTypes({"properties": {"a": schema}, "$defs": {"Count": {"type": "integer"}}})
    got = json.loads(types.to_json("a", text))
    assert got == value and type(got) is type(value)
