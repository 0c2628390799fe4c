"""Text of one choice: any grouping of the same tokens gives the same text, reason and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegainfer_core.messages import FinishReason, RequestOutput, TokenLogprob
from pegainfer_core.testing.tiny_tokenizer import tiny_tokenizer
from pegainfer_core.tokenizer import Detokenizer, Tokenizer
from pegainfer_server.text_stream import StopMatcher, TextDelta, TextStream

TOKENIZER = Tokenizer(tiny_tokenizer())


def output(
    ids: Sequence[int],
    total: int,
    finish: FinishReason | None = None,
    *,
    logprobs: bool = False,
    stop_id: int | None = None,
) -> RequestOutput:
    entries = [TokenLogprob(token_id, -1.0, 1, []) for token_id in ids] if logprobs else None
    return RequestOutput("r", list(ids), entries, None, None, finish, stop_id, total, None, None, None)


class Characters:
    """A detokenizer whose token ids are code points, and which holds every 0 back until the next token."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._held
        self._held = ""
        for token_id in token_ids:
            text += chr(token_id or ord("?"))
        if token_ids and token_ids[-1] == 0:
            self._held, text = text[-1], text[:-1]
        return text

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def run(
    stream: TextStream, groups: Sequence[Sequence[int]], finish: FinishReason, *, logprobs: bool = False
) -> TextDelta:
    """All deltas joined; the deltas before the last must not finish."""
    joined = TextDelta()
    total = 0
    outputs = []
    for group in groups:
        total += len(group)
        outputs.append(output(group, total, logprobs=logprobs))
    outputs.append(output([], total, finish, logprobs=logprobs))
    for item in outputs:
        delta = stream.push(item)
        joined.text += delta.text
        joined.token_ids += delta.token_ids
        joined.logprobs += delta.logprobs
        joined.finish_reason, joined.stop_reason, joined.num_tokens = (
            delta.finish_reason,
            delta.stop_reason,
            delta.num_tokens,
        )
        if delta.finish_reason is not None:
            return joined
    raise AssertionError("the stream never ended")


def text_of(text: str, stops: Sequence[str], **options: Any) -> tuple[str, Any]:
    result = run(TextStream(Characters(), stops=stops, **options), [[ord(c)] for c in text], "length")
    return result.text, result.stop_reason


def test_stop_over_several_tokens_never_shows_its_beginning() -> None:
    """A1."""
    stream = TextStream(Characters(), stops=["DEFG"])
    deltas = [stream.push(output([ord(c)], i + 1)).text for i, c in enumerate("ABCDEF")]
    assert deltas == ["A", "B", "C", "", "", ""]
    last = stream.push(output([ord("G")], 7))
    assert (last.text, last.finish_reason, last.stop_reason, last.num_tokens) == ("", "stop", "DEFG", 7)


def test_stop_inside_one_token_cuts_at_the_character() -> None:
    """A2."""
    stream = TextStream(Detokenizer(TOKENIZER), stops=["capital"])
    ids = TOKENIZER.encode("What is the capital of France?")
    result = run(stream, [ids], "length")
    assert (result.text, result.stop_reason) == ("What is the ", "capital")


def test_a_match_that_does_not_complete_is_delivered() -> None:
    """A7."""
    assert text_of("XYA", ["XYZ"]) == ("XYA", None)
    assert text_of("XY", ["XYZ"]) == ("XY", None)
    assert text_of("XXYZ", ["XYZ"]) == ("X", "XYZ")


def test_the_match_completed_first_wins_and_then_the_longest() -> None:
    """A2."""
    assert text_of("abcdef", ["def", "cd"]) == ("ab", "cd")
    assert text_of("abcdef", ["abcdef", "bc"]) == ("a", "bc")
    assert text_of("abcdef", ["cd", "bcd", "d"]) == ("a", "bcd")


def test_stop_may_be_included() -> None:
    """A3."""
    assert text_of("abcdef", ["cd"], include_stop=True) == ("abcd", "cd")


def test_min_tokens_lets_early_matches_pass() -> None:
    assert text_of("aXbXc", ["X"], min_tokens=2) == ("aXb", "X")
    assert text_of("aXYb", ["XY"], min_tokens=2) == ("a", "XY")
    assert text_of("aXYb", ["XY"], min_tokens=3) == ("aXYb", None)


def test_engine_finish_keeps_its_own_reason_and_count() -> None:
    stream = TextStream(Characters(), stops=["zz"])
    last = stream.push(output([ord("a"), ord("z")], 3, "stop", stop_id=7))
    assert (last.text, last.finish_reason, last.stop_reason, last.num_tokens) == ("az", "stop", 7, 3)


def test_a_stop_string_found_with_the_last_tokens_is_the_reason() -> None:
    stream = TextStream(Characters(), stops=["b"])
    last = stream.push(output([ord("a"), ord("b"), ord("c")], 3, "length"))
    assert (last.text, last.finish_reason, last.stop_reason, last.num_tokens) == ("a", "stop", "b", 2)


def test_text_held_back_by_the_detokenizer_is_flushed_and_searched() -> None:
    assert run(TextStream(Characters()), [[97, 0]], "length").text == "a?"
    assert run(TextStream(Characters(), stops=["a?"]), [[97, 0]], "length").stop_reason == "a?"


def test_logprobs_come_with_their_text_and_those_after_the_cut_are_dropped() -> None:
    stream = TextStream(Characters(), stops=["cd"], offset=10)
    first = stream.push(output([ord("a"), ord("c")], 2, logprobs=True))
    assert [(placed.entry.token_id, placed.offset) for placed in first.logprobs] == [(ord("a"), 10)]
    second = stream.push(output([ord("x"), ord("c"), ord("d"), ord("e")], 6, logprobs=True))
    assert [(placed.entry.token_id, placed.offset) for placed in second.logprobs] == [(ord("c"), 11), (ord("x"), 12)]
    assert (second.text, second.token_ids) == ("cx", [ord("x"), ord("c"), ord("d")])


def test_tokens_of_one_character_share_its_offset() -> None:
    ids = TOKENIZER.encode("a\U0001f389b")
    result = run(TextStream(Detokenizer(TOKENIZER)), [ids], "length", logprobs=True)
    assert [placed.offset for placed in result.logprobs] == [0, 1, 1, 1, 1, 2]


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_matcher_agrees_with_its_definition(text: str, stops: list[str]) -> None:
    ends = [(text[:end], stop) for end in range(1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    shortest = min((len(prefix) for prefix, _ in ends), default=None)
    expected = max((stop for prefix, stop in ends if len(prefix) == shortest), key=len, default=None)
    found = StopMatcher(stops).find(text, 0)
    assert (None if found is None else found[2]) == expected
    if found is not None:
        assert text[found[0] : found[1]] == expected and found[1] == shortest


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_held_back_is_the_longest_possible_beginning(text: str, stops: list[str]) -> None:
    possible = [n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])]
    assert StopMatcher(stops).held_back(text) == max(possible, default=0)


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]]]:
    """Token ids, and two ways to group them."""
    ids = draw(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=24))
    groups = []
    for _ in range(2):
        rest, cut = list(ids), []
        while rest:
            size = draw(st.integers(1, len(rest)))
            cut.append(rest[:size])
            rest = rest[size:]
        groups.append(cut)
    return ids, groups


@given(
    chunkings(),
    st.lists(st.text("the \n\ufffdao", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from(["length", "stop"]),
    st.booleans(),
)
def test_grouping_changes_nothing(
    chunking: tuple[list[int], list[list[list[int]]]],
    stops: list[str],
    include_stop: bool,
    min_tokens: int,
    finish: FinishReason,
    logprobs: bool,
) -> None:
    """A3, A17."""
    ids, (one, other) = chunking
    results = [
        run(
            TextStream(Detokenizer(TOKENIZER), stops=stops, include_stop=include_stop, min_tokens=min_tokens),
            groups,
            finish,
            logprobs=logprobs,
        )
        for groups in (one, other, [[token_id] for token_id in ids])
    ]
    assert results[0] == results[1] == results[2]
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert text.startswith(results[0].text.rstrip("\ufffd"))
    if results[0].stop_reason is None:
        assert results[0].text == text
    else:
        assert results[0].stop_reason in stops


@pytest.mark.parametrize("stop", ["a" * 1024, "a" * 1023 + "b"])
def test_long_stops_are_found_in_repetitive_text(stop: str) -> None:
    assert text_of("a" * 2000 + "b" * 10, [stop])[1] == stop
