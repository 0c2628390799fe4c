"""From the pieces of an answer to token times: events cut anywhere, usage that must be right, every way to fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pegainfer_server.bench.client import Endpoint, Exchange
from pegainfer_server.bench.records import events, read

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def exchange(*pieces: bytes, status: int = 200, failure: str | None = None) -> Exchange:
    """An answer whose pieces arrive a second apart, the first at second 11 of a request sent at 10."""
    timed = [(11.0 + index, piece) for index, piece in enumerate(pieces)]
    return Exchange(sent=10.0, ended=20.0, status=status, pieces=timed, failure=failure)


GOOD = [event(chunk("a")), event(chunk("b")), event(chunk("c", "length")), event({"choices": [], "usage": USAGE})]
DONE = event(b"[DONE]")


def test_times_of_a_good_answer() -> None:
    record = read(exchange(*GOOD, DONE), 5, 3)
    assert record.error is None
    assert record.token_times == (11.0, 12.0, 13.0)
    assert (record.ttft, record.tpot, record.itl, record.e2e) == (1.0, 1.0, [1.0, 1.0], 3.0)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (5, 3, 2)


def test_a_single_token_has_no_pace() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    record = read(exchange(event(chunk("", "length")), event({"choices": [], "usage": usage}), DONE), 5, 1)
    assert record.error is None
    assert (record.ttft, record.tpot, record.itl, record.cached_tokens) == (1.0, None, [], None)


def test_an_event_that_only_ends_the_choice_is_no_token() -> None:
    last = [event(chunk("c")), event(chunk("", "length")), *GOOD[3:], DONE]
    assert read(exchange(*GOOD[:2], *last), 5, 3).token_times == (11.0, 12.0, 13.0)


def test_several_tokens_may_come_in_one_event() -> None:
    record = read(exchange(event(chunk("ab")), event(chunk("c", "length")), *GOOD[3:], DONE), 5, 3)
    assert record.error is None
    assert record.tpot == 0.5
    assert record.itl == [1.0]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_found_wherever_they_are_cut(newline: bytes) -> None:
    stream = b": a comment\n\n" + b"".join([*GOOD, DONE])
    stream = stream.replace(b"\n", newline)
    whole = [data for _, data in events([(0.0, stream)])]
    assert whole[-1] == b"[DONE]"
    assert len(whole) == 5
    for cut in range(1, len(stream)):
        assert [data for _, data in events([(0.0, stream[:cut]), (1.0, stream[cut:])])] == whole
    one_by_one = [(float(index), stream[index : index + 1]) for index in range(len(stream))]
    assert [data for _, data in events(one_by_one)] == whole


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (exchange(failure="ConnectionResetError: gone"), "ConnectionResetError: gone"),
        (exchange(b'{"error": {"message": "too long"}}', status=400), "HTTP 400: too long"),
        (exchange(b"<html>", status=502), "HTTP 502: <html>"),
        (exchange(*GOOD), r"ended without \[DONE\]"),
        (exchange(DONE), "no token"),
        (exchange(*GOOD[:3], DONE), "no usage"),
        (exchange(GOOD[0], event({"error": {"message": "died"}}), DONE), "event: .*died"),
        (exchange(event(b"{nonsense"), DONE), "no JSON"),
        (exchange(*GOOD[:3], event({"usage": USAGE | {"completion_tokens": 2}}), DONE), "2 output tokens, .* 5 and 3"),
        (exchange(*GOOD[:3], event({"usage": USAGE | {"prompt_tokens": 6}}), DONE), "counts 6 prompt"),
        (exchange(*GOOD[:1] * 4, *GOOD[3:], DONE), "4 events with tokens for 3 tokens"),
    ],
)
def test_failures_say_what_is_wrong(answer: Exchange, error: str) -> None:
    record = read(answer, 5, 3)
    assert record.error is not None
    with pytest.raises(ValueError, match=error):
        raise ValueError(record.error)


def test_endpoint_takes_urls_with_and_without_v1() -> None:
    assert Endpoint("a", "http://h:1/v1/", "m").root == Endpoint("a", "http://h:1", "m").root == "http://h:1"
    with pytest.raises(ValueError, match="no http or https URL"):
        Endpoint("a", "h:1", "m")
