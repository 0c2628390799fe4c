"""What is known of an engine request once it has ended, for whoever observes requests (tracing).

Owns the record and the W3C trace context that a client sent with the HTTP request being served. Knows nothing of who reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextvars import ContextVar

TRACE_HEADERS = ("traceparent", "tracestate")
caller_trace: ContextVar[Mapping[str, str]] = ContextVar("caller_trace", default={})  # noqa: B039 - never changed in place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Times are of time.perf_counter."""

    request_id: str
    trace: Mapping[str, str]
    """The caller's trace headers."""
    arrival: float
    ended: float
    first_token: float | None
    last_token: float | None
    engine_times: tuple[float, float] | None
    """Seconds waiting in the engine, and from then to the first token; None if it ended before that."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str


ObserveRequest = Callable[[EndedRequest], None]
