"""Traces: one span for each engine request with queue, prefill and decode below it, under the caller's own trace."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pegainfer_core.errors import ConfigError
from pegainfer_core.testing.fake_client import TIMES
from pegainfer_server.tracing import Tracing, open_tracing

Serve = Callable[..., Awaitable[Any]]
TRACE = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = f"00-{TRACE:032x}-b7ad6b7169203331-01"
NOT_SAMPLED = f"00-{TRACE:032x}-b7ad6b7169203331-00"


class Traced:
    """A served application whose spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._exporter), "tiny")

    def take(self) -> dict[str, list[ReadableSpan]]:
        """Spans by name since the last call."""
        found: dict[str, list[ReadableSpan]] = {}
        for span in self._exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        self._exporter.clear()
        return found


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


async def test_a_request_has_queue_prefill_and_decode(serve: Serve) -> None:
    traced = Traced()
    served = await serve(on_request=[traced.tracing.on_request])
    for fields in ({}, {"stream": True}, {"n": 2}):
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, **fields}
        await served.http.post("/v1/completions", json=body, headers={"traceparent": PARENT, "tracestate": "a=b"})
        spans = traced.take()
        count = body.get("n", 1)
        assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(
            ("request", "queue", "prefill", "decode"), count
        )
        for root in spans["request"]:
            assert root.context.trace_id == TRACE and root.parent is not None
            assert root.parent.span_id == 0xB7AD6B7169203331
            assert root.attributes is not None and root.attributes["gen_ai.usage.output_tokens"] == 3
            assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
        roots = {root.context.span_id for root in spans["request"]}
        for queue, prefill, decode in zip(spans["queue"], spans["prefill"], spans["decode"], strict=True):
            assert {part.parent.span_id for part in (queue, prefill, decode) if part.parent} <= roots
            assert times(queue)[1] == times(prefill)[0] and times(prefill)[1] == times(decode)[0]
            begin, end = times(prefill)
            assert end - begin == pytest.approx(TIMES[1] * 1e9, rel=1e-3)


async def test_without_a_caller_a_trace_is_new_and_unsampled_ones_are_not_made(serve: Serve) -> None:
    traced = Traced()
    served = await serve(on_request=[traced.tracing.on_request])
    for headers in ({}, {"traceparent": "00-nonsense-01"}):
        await served.http.post("/v1/completions", json={"prompt": "Hello"}, headers=headers)
        (root,) = traced.take()["request"]
        assert root.parent is None and root.context.trace_id != TRACE
    await served.http.post("/v1/completions", json={"prompt": "Hello"}, headers={"traceparent": NOT_SAMPLED})
    assert traced.take() == {}


async def test_a_request_that_fails_is_an_error_that_only_waited(serve: Serve) -> None:
    traced = Traced()
    served = await serve(on_request=[traced.tracing.on_request])
    served.engine.rejection = ("queue_full", "too many")
    await served.http.post("/v1/completions", json={"prompt": "Hello"})
    spans = traced.take()
    assert set(spans) == {"request", "queue"}
    assert spans["request"][0].status.status_code is StatusCode.ERROR


def test_spans_reach_a_collector() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = open_tracing(f"http://127.0.0.1:{collector.server_port}", "tiny")
        from pegainfer_server.request_times import EndedRequest

        ended = EndedRequest(
            request_id="cmpl-1-0",
            trace={"traceparent": PARENT},
            arrival=0.0,
            ended=3.0,
            first_token=2.0,
            last_token=3.0,
            engine_times=(0.5, 1.5),
            prompt_tokens=5,
            cached_tokens=0,
            output_tokens=2,
            finish_reason="stop",
        )
        tracing.on_request(ended)
        tracing.close()
        collector.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert "pegainfer" in {attribute.value.string_value for attribute in resource.resource.attributes}
    assert {span.name for span in resource.scope_spans[0].spans} == {"request", "queue", "prefill", "decode"}


@pytest.mark.parametrize("url", ["collector:4317", "grpc://collector", "http://", ""])
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        open_tracing(url, "tiny")
