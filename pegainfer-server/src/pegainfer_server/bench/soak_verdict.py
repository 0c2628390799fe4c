"""Whether what came back for a request of a soak is what must come back.

Owns the rules: a valid request gets a whole answer or an honest refusal of a full server; an invalid one gets a 4xx with an error object;
nothing gets a 5xx of any other kind.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from pegainfer_server.bench.client import Exchange
from pegainfer_server.bench.records import OK, events
from pegainfer_server.bench.soak_requests import SoakRequest

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})
FULL = (429, 503)
"""A server may say that it has no room."""
SHOWN = 160
"""Characters of an answer in a complaint."""


def refused(exchange: Exchange) -> bool:
    """Whether the server said that it is full."""
    return exchange.failure is None and exchange.status in FULL


def complaint(request: SoakRequest, exchange: Exchange) -> str | None:
    """What is wrong with the answer to a request that was not dropped; None if nothing is."""
    if exchange.failure is not None:
        return f"connection: {exchange.failure}"
    if refused(exchange):
        return None
    body = b"".join(piece for _, piece in exchange.pieces)
    try:
        if request.kind == "invalid":
            return _refusal(request, exchange.status, body)
        if exchange.status != OK:
            return f"{request.name}: HTTP {exchange.status}: {_short(body)}"
        return _stream(request, exchange) if request.stream else _whole(request, msgspec.json.decode(body))
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        return f"{request.name}: the answer has another shape ({error!r}): {_short(body)}"


def _refusal(request: SoakRequest, status: int, body: bytes) -> str | None:
    if not 400 <= status < 500:
        return f"{request.name}: HTTP {status} for an invalid request: {_short(body)}"
    message = msgspec.json.decode(body)["error"]["message"]
    return None if message else f"{request.name}: the error has no message"


def _whole(request: SoakRequest, data: dict[str, Any]) -> str | None:
    reasons = [choice["finish_reason"] for choice in data["choices"]]
    return _ended(request, Counter(choice["index"] for choice in data["choices"]), reasons, data.get("usage"))


def _stream(request: SoakRequest, exchange: Exchange) -> str | None:
    datas = [data for _, data in events(exchange.pieces)]
    if not datas or datas[-1] != b"[DONE]":
        return f"{request.name}: the stream ended without [DONE]"
    chunks = [msgspec.json.decode(data) for data in datas[:-1]]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    if errors:
        return f"{request.name}: an error in the stream: {errors[0]}"
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason") is not None]
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    reasons = [choice["finish_reason"] for choice in ends]
    return _ended(request, Counter(choice["index"] for choice in ends), reasons, usage)


def _ended(request: SoakRequest, indices: Counter[int], reasons: list[str], usage: object) -> str | None:
    if indices != Counter(range(request.choices)):
        return f"{request.name}: {request.choices} choices were asked for, ended have {dict(sorted(indices.items()))}"
    odd = set(reasons) - FINISH_REASONS
    if odd:
        return f"{request.name}: finish reasons {sorted(odd)}"
    return None if usage else f"{request.name}: no usage"


def _short(body: bytes) -> str:
    return body[:SHOWN].decode("utf-8", "replace")
