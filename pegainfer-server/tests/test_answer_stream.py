"""Chat answers from tokens: nothing depends on how engine steps group them, and each kind of text knows its own stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pegainfer_core.chat_events import ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from pegainfer_core.chat_syntax import AnswerParser, Marks, ParserSettings, Tool, kimi_syntax, qwen_json_syntax
from pegainfer_core.messages import FinishReason, RequestOutput, TokenLogprob
from pegainfer_core.testing.tiny_chat import PLAIN_MARKS, tiny_chat_tokenizer
from pegainfer_core.tokenizer import Detokenizer, Tokenizer
from pegainfer_server.answer_stream import AnswerStream, StopRules

KIMI_MARKS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
ARGUMENT_MARK = "<|tool_call_argument_begin|>"
QWEN = Tokenizer(tiny_chat_tokenizer())
KIMI = Tokenizer(tiny_chat_tokenizer(PLAIN_MARKS[:2], (*KIMI_MARKS, ARGUMENT_MARK)))
TOOLS = {"f": Tool("f")}
PARTS = [
    *("<think>", "</think>", "\n", " ", "the ", "x", "\u20ac", "stop", "st", "op"),
    '<tool_call>\n{"name": "f", "arguments": {"stop": "x"}}\n</tool_call>',
    f"{KIMI_MARKS[0]}{KIMI_MARKS[2]}functions.f:0{ARGUMENT_MARK}{{}}{KIMI_MARKS[3]}{KIMI_MARKS[1]}",
    *KIMI_MARKS,
]


def outputs(groups: Sequence[Sequence[int]], finish: FinishReason) -> list[RequestOutput]:
    total = 0
    made = []
    for index, group in enumerate(groups):
        total += len(group)
        entries = [TokenLogprob(token_id, -1.0, 1, []) for token_id in group]
        reason = finish if index == len(groups) - 1 else None
        made.append(
            RequestOutput(
                "r", list(group), entries, None, None, reason, None, total, error=None, rejection=None, times=None
            )
        )
    return made


def run(
    tokenizer: Tokenizer, groups: Sequence[Sequence[int]], finish: FinishReason, rules: StopRules
) -> dict[str, Any]:
    """Everything that the deltas tell, joined."""
    syntax = (kimi_syntax if tokenizer is KIMI else qwen_json_syntax)(Marks(tokenizer))
    parser = AnswerParser(syntax, ParserSettings(tools=TOOLS))
    stream = AnswerStream(Detokenizer(tokenizer, marks=syntax.marks.by_id), parser, rules)
    joined: dict[str, Any] = {"text": "", "thought": "", "calls": [], "tokens": [], "logprobs": []}
    for output in outputs(groups, finish):
        delta = stream.push(output)
        joined["text"] += delta.text
        joined["tokens"] += delta.token_ids
        joined["logprobs"] += [(placed.entry.token_id, placed.offset) for placed in delta.logprobs]
        for event in delta.events or ():
            if isinstance(event, ReasoningDelta):
                joined["thought"] += event.text
            elif isinstance(event, ToolCallStart):
                joined["calls"].append([event.name, ""])
            elif isinstance(event, ToolArgumentsDelta):
                joined["calls"][event.index][1] += event.text
        joined["end"] = (delta.finish_reason, delta.stop_reason, delta.num_tokens, delta.num_reasoning_tokens)
        if delta.finish_reason is not None:
            return joined
    raise AssertionError("the stream never ended")


@given(
    st.sampled_from([QWEN, KIMI]),
    st.lists(st.sampled_from(PARTS), max_size=10).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.lists(st.sampled_from(["stop", "the x", "\n", "x"]), max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.integers(0, 5),
)
def test_grouping_changes_nothing(
    tokenizer: Tokenizer,
    text: str,
    sizes: list[int],
    stops: list[str],
    include: bool,
    in_reasoning: bool,
    finish: FinishReason,
    min_tokens: int,
) -> None:
    ids = tokenizer.encode(text)
    groups: list[list[int]] = []
    rest = list(ids)
    while rest:
        size = sizes[len(groups) % len(sizes)]
        groups.append(rest[:size])
        rest = rest[size:]
    rules = StopRules(stops=stops, include_stop=include, in_reasoning=in_reasoning, min_tokens=min_tokens)
    single = run(tokenizer, [*([token_id] for token_id in ids), []], finish, rules)
    assert run(tokenizer, [*groups, []], finish, rules) == single
    if groups:
        # the end may come with the last tokens
        assert run(tokenizer, groups, finish, rules) == single
    assert [token_id for token_id, _ in single["logprobs"]] == single["tokens"][: len(single["logprobs"])]
    if not stops:
        assert len(single["logprobs"]) == len(ids)
    if stops and not include and single["end"][1] is None and min_tokens == 0:
        assert not any(stop in single["text"] for stop in stops) or len(single["calls"]) + len(single["thought"]) > 0


def test_a_stop_string_in_a_call_is_part_of_it() -> None:
    ids = QWEN.encode('<tool_call>\n{"name": "f", "arguments": {"a": "stop"}}\n</tool_call>\nNow stop.')
    result = run(QWEN, [ids, []], "length", StopRules(stops=["stop"]))
    assert result["calls"] == [["f", '{"a": "stop"}']]
    assert result["text"] == "Now " and result["end"][:2] == ("tool_calls", "stop")
