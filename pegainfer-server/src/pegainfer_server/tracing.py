"""OpenTelemetry traces: a span for each engine request, with its queue, prefill and decode below it.

Owns spans and where they are sent (OTLP over HTTP). Needs the extra `tracing`; without the flag nothing of it is imported. Spans are
made when a request has ended, from times that the metrics know anyway, so a running request costs nothing more. The caller's W3C
trace context is the parent; sampling follows it, else OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pegainfer_core
from pegainfer_core.errors import ConfigError

from pegainfer_server.request_times import EndedRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

SERVICE = "pegainfer"
DEFAULT_PATH = "/v1/traces"


class Tracing:
    """Turns ended requests into spans. `processor` takes them."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": SERVICE}
        self._provider = TracerProvider(
            resource=Resource.create({**names, "service.version": pegainfer_core.__version__})
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE, pegainfer_core.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def on_request(self, ended: EndedRequest) -> None:
        """Record one request that ended; see `request_times.ObserveRequest`."""
        from opentelemetry import trace

        to_epoch = time.time() - time.perf_counter()  # perf_counter has no date
        span = self._tracer.start_span(
            "request",
            self._propagator.extract(ended.trace),
            trace.SpanKind.SERVER,
            start_time=_nanoseconds(ended.arrival + to_epoch),
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": ended.request_id,
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.output_tokens": ended.output_tokens,
                "gen_ai.response.finish_reasons": (ended.finish_reason,),
                "pegainfer.cached_tokens": ended.cached_tokens,
            },
        )
        if ended.finish_reason == "error":
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for name, begin, end in _parts(ended):
            self._part(name, begin + to_epoch, end + to_epoch, inside)
        span.end(_nanoseconds(ended.ended + to_epoch))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _part(self, name: str, begin: float, end: float, inside: Context) -> None:
        self._tracer.start_span(name, inside, start_time=_nanoseconds(begin)).end(_nanoseconds(end))


def open_tracing(endpoint: str, model: str) -> Tracing:
    """Tracing to an OTLP collector. Raises ConfigError for a URL that is none, or if the extra is missing."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: must be a URL such as http://127.0.0.1:4318")
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'pegainfer[tracing]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint if parts.path not in ("", "/") else endpoint.rstrip("/") + DEFAULT_PATH
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), model)


def _parts(ended: EndedRequest) -> list[tuple[str, float, float]]:
    """(name, begin, end) of what a request went through. Queue and prefill end at the first token; the rest is decode.

    A request without a token has only waited, as far as this process knows.
    """
    if ended.engine_times is None or ended.first_token is None or ended.last_token is None:
        return [("queue", ended.arrival, ended.ended)]
    queue, prefill = ended.engine_times
    admitted = ended.first_token - prefill
    return [
        ("queue", max(ended.arrival, admitted - queue), admitted),
        ("prefill", admitted, ended.first_token),
        ("decode", ended.first_token, ended.last_token),
    ]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
