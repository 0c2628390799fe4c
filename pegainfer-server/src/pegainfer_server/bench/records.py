"""What came back for one request, read from the pieces of its answer: token times, usage, or why it failed.

Owns the meaning of TTFT, TPOT and ITL. A token's time is the arrival of the event that carries it. Counts come from the usage that the
engine reports and are checked against what was asked, so an engine that stops early or counts wrongly is a failure, not a fast one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pegainfer_server.bench.client import Exchange

OK = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds of time.perf_counter."""

    sent: float
    ended: float
    token_times: tuple[float, ...]
    """Arrival of each event with tokens; engines may put several tokens into one."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the engine says it took from its cache; None if it does not say."""
    error: str | None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.token_times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last token."""
        return self.token_times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between consecutive events with tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def read(exchange: Exchange, prompt_tokens: int, output_tokens: int) -> RequestRecord:
    """The record of a streamed completion that was asked for exactly `output_tokens` after `prompt_tokens`."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    error = exchange.failure
    done = False
    if error is None and exchange.status != OK:
        error = f"HTTP {exchange.status}: {_message(exchange)}"
    elif error is None:
        try:
            for moment, data in events(exchange.pieces):
                if data == b"[DONE]":
                    done = True
                    continue
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    error = f"event: {chunk['error']}"
                    break
                usage = chunk.get("usage") or usage
                if any(_has_token(choice, bool(times)) for choice in chunk.get("choices", ())):
                    times.append(moment)
        except msgspec.DecodeError as decode_error:
            error = f"an event is no JSON: {decode_error}"
    counted = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
    if error is None:
        error = _complaint(done, times, usage, counted, (prompt_tokens, output_tokens))
    details = usage.get("prompt_tokens_details") or {}
    return RequestRecord(
        sent=exchange.sent,
        ended=exchange.ended,
        token_times=tuple(times),
        prompt_tokens=counted[0],
        output_tokens=counted[1],
        cached_tokens=details.get("cached_tokens"),
        error=error,
    )


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Data of each server-sent event and the arrival of the piece that completed it."""
    rest = b""
    for moment, piece in pieces:
        *complete, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in complete:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield moment, b"\n".join(lines)


def _has_token(choice: dict[str, Any], begun: bool) -> bool:
    """Whether a choice of an event carries a token: not if it only says why the choice ended."""
    return not begun or bool(choice.get("text")) or choice.get("finish_reason") is None


def _message(exchange: Exchange) -> str:
    body = b"".join(piece for _, piece in exchange.pieces)
    try:
        error = msgspec.json.decode(body).get("error", body)
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (msgspec.DecodeError, AttributeError, KeyError):
        return body[:200].decode("utf-8", "replace")


def _complaint(
    done: bool, times: list[float], usage: dict[str, Any], counted: tuple[int, int], asked: tuple[int, int]
) -> str | None:
    if not done:
        return "the stream ended without [DONE]"
    if not times:
        return "the stream had no token"
    if not usage:
        return "the stream had no usage"
    if counted != asked:
        return f"usage counts {counted[0]} prompt and {counted[1]} output tokens, asked were {asked[0]} and {asked[1]}"
    if len(times) > asked[1]:
        return f"{len(times)} events with tokens for {asked[1]} tokens"
    return None
