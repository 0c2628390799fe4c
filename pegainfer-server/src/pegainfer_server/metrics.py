"""What /metrics tells, under vLLM's metric names so that dashboards made for it work.

Owns the collector of one application and the record of one request. Two feeds: the engine's statistics (read from the client when
scraped) and the times of requests as this process sees them. A family that nothing feeds is left out; none is a constant zero.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from pegainfer_core.messages import AddRequest, RequestOutput, SnapshotStats, StepOutputs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pegainfer_server import histogram as h
from pegainfer_server.request_times import EndedRequest, ObserveRequest, caller_trace
from pegainfer_server.state import ServerState

ENGINE_LABELS = ("model_name", "engine")
ENGINE = "0"  # index of the engine replica
ACTS = ("plan", "run", "commit")
"""Of `StepOutputs.act_seconds`."""

_HISTOGRAMS = {
    "time_to_first_token_seconds": (h.TTFT_BUCKETS, "From arrival of a request to its first token."),
    "inter_token_latency_seconds": (h.TOKEN_LATENCY_BUCKETS, "Between successive outputs of a request."),
    "request_time_per_output_token_seconds": (h.TOKEN_LATENCY_BUCKETS, "Mean time per token after a request's first."),
    "e2e_request_latency_seconds": (h.LATENCY_BUCKETS, "From arrival of a request to its end."),
    "request_queue_time_seconds": (h.LATENCY_BUCKETS, "Waiting in the engine."),
    "request_prefill_time_seconds": (h.LATENCY_BUCKETS, "From leaving the queue to the first token."),
    "request_decode_time_seconds": (h.LATENCY_BUCKETS, "From the first token to the last."),
    "request_inference_time_seconds": (h.LATENCY_BUCKETS, "In prefill and decode."),
    "request_prompt_tokens": (h.TOKEN_COUNT_BUCKETS, "Prompt tokens per request."),
    "request_generation_tokens": (h.TOKEN_COUNT_BUCKETS, "Generated tokens per request."),
    "request_prefill_kv_computed_tokens": (h.TOKEN_COUNT_BUCKETS, "Prompt tokens computed, not cached, per request."),
    "request_params_max_tokens": (h.TOKEN_COUNT_BUCKETS, "max_tokens per request, as served."),
    "request_params_n": (h.CHOICE_COUNT_BUCKETS, "n per HTTP request."),
    "iteration_tokens_total": (h.STEP_TOKEN_BUCKETS, "Tokens computed per engine step."),
}


class RequestRecord:
    """Times of one engine request, told to the metrics as they happen. `end` must be called exactly once."""

    __slots__ = (
        "_arrival",
        "_cached",
        "_first",
        "_last",
        "_metrics",
        "_prompt_tokens",
        "_request_id",
        "_times",
        "_tokens",
        "_trace",
    )

    def __init__(self, metrics: ServerMetrics, arrival: float, request: AddRequest) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._prompt_tokens = len(request.prompt_ids)
        self._first: float | None = None
        self._last = arrival
        self._tokens = 0
        self._request_id = request.request_id
        self._trace = caller_trace.get()
        self._cached: int | None = None
        self._times: tuple[float, float] | None = None
        metrics.observe("request_params_max_tokens", request.params.max_tokens or 0)

    def saw(self, output: RequestOutput) -> None:
        """Take note of one engine output."""
        if output.num_cached_tokens is not None:
            self._cached = output.num_cached_tokens
        if output.times is not None:
            self._times = output.times
        self._tokens = output.num_output_tokens
        if output.token_ids:
            now = time.perf_counter()
            if self._first is None:
                self._first = now
                self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
            else:
                self._metrics.inter_token.observe(now - self._last)
            self._last = now

    def end(self, finish_reason: str) -> None:
        """The request ended: stop, length, abort (the client left) or error."""
        observe = self._metrics.observe
        self._metrics.finished[finish_reason] += 1
        observe("e2e_request_latency_seconds", time.perf_counter() - self._arrival)
        observe("request_prompt_tokens", self._prompt_tokens)
        observe("request_generation_tokens", self._tokens)
        if self._first is not None and self._tokens > 1:
            observe("request_time_per_output_token_seconds", (self._last - self._first) / (self._tokens - 1))
        if self._cached is not None:
            observe("request_prefill_kv_computed_tokens", self._prompt_tokens - self._cached)
        if self._times is not None:
            queue, prefill = self._times
            decode = 0.0 if self._first is None else self._last - self._first
            observe("request_queue_time_seconds", queue)
            observe("request_prefill_time_seconds", prefill)
            observe("request_decode_time_seconds", decode)
            observe("request_inference_time_seconds", prefill + decode)
        if self._metrics.on_request:
            self._tell(finish_reason)

    def _tell(self, finish_reason: str) -> None:
        ended = EndedRequest(
            request_id=self._request_id,
            trace=self._trace,
            arrival=self._arrival,
            ended=time.perf_counter(),
            first_token=self._first,
            last_token=None if self._first is None else self._last,
            engine_times=self._times,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached or 0,
            output_tokens=self._tokens,
            finish_reason=finish_reason,
        )
        for observe in self._metrics.on_request:
            observe(ended)


class ServerMetrics(Collector):
    """Everything one application measures. Each has its own registry."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._histograms = {name: h.Histogram(buckets) for name, (buckets, _) in _HISTOGRAMS.items()}
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self._acts = {act: h.Histogram(h.ACT_BUCKETS) for act in ACTS}
        self.finished: Counter[str] = Counter()
        self._http_count: Counter[tuple[str, str, str]] = Counter()
        self._http_seconds: dict[tuple[str, str], h.Histogram] = {}
        self.on_request: list[ObserveRequest] = state.on_request
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def observe(self, name: str, value: float) -> None:
        """Count `value` in the histogram vllm:`name`."""
        self._histograms[name].observe(value)

    def on_step(self, step: StepOutputs) -> None:
        """Take note of one engine step."""
        if step.num_tokens:
            self.observe("iteration_tokens_total", step.num_tokens)
        if step.act_seconds is not None:
            for act, seconds in zip(ACTS, step.act_seconds, strict=True):
                self._acts[act].observe(seconds)

    def recorder(self, arrival: float, request: AddRequest) -> Callable[[], RequestRecord]:
        """Begins the record of `request`, which arrived at `arrival` (perf_counter), when it is called."""
        return partial(RequestRecord, self, arrival, request)

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count one HTTP request; `handler` is the route's path pattern."""
        self._http_count[(method, f"{status // 100}xx", handler)] += 1
        self._http_seconds.setdefault((method, handler), h.Histogram(h.HTTP_BUCKETS)).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client for each scrape."""
        labels = (self._state.model_names[0], ENGINE)
        if self._state.client.state == "ready":
            yield from self._engine_families(labels)
        for name, (_, text) in _HISTOGRAMS.items():
            if self._histograms[name].count:
                family = HistogramMetricFamily(f"vllm:{name}", text, labels=ENGINE_LABELS)
                self._histograms[name].add_to(family, labels)
                yield family
        if self._acts["run"].count:
            family = HistogramMetricFamily(
                "pegainfer:engine_step_seconds",
                "Host time of an engine step by act; run is launching it and waiting for results.",
                labels=(*ENGINE_LABELS, "act"),
            )
            for act, histogram in self._acts.items():
                histogram.add_to(family, (*labels, act))
            yield family
        if self.finished:
            success = CounterMetricFamily(
                "vllm:request_success", "Requests that ended, by reason.", labels=(*ENGINE_LABELS, "finished_reason")
            )
            for reason, count in sorted(self.finished.items()):
                success.add_metric([*labels, reason], count)
            yield success
        yield from self._http_families()

    def _engine_families(self, labels: tuple[str, str]) -> Iterator[Metric]:
        stats = self._state.client.stats
        gauges = [
            ("num_requests_running", "Requests that the engine computes.", stats.num_running),
            ("num_requests_waiting", "Requests that wait in the engine.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV pages that running requests hold; 1 is all.", stats.kv_usage),
        ]
        counters = [
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Requests preempted for lack of KV pages.", stats.preemptions),
        ]
        if self._state.prefix_cache:
            counters += [
                ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", stats.cached_tokens),
                ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
                ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ]
        yield from self._snapshot_families(labels, stats.snapshots)
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=ENGINE_LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=ENGINE_LABELS)
            counter.add_metric(labels, value)
            yield counter

    def _snapshot_families(self, labels: tuple[str, str], stats: SnapshotStats | None) -> Iterator[Metric]:
        """Of models with recurrent state: a prefix is cached where its pages and a snapshot of the state are."""
        if stats is None:
            return
        gauges = [
            ("state_snapshots", "Snapshots of recurrent state that are held.", stats.num_held),
            ("state_snapshot_slots", "Snapshots of recurrent state that fit.", stats.num_slots),
            ("state_snapshot_bytes", "Bytes of the snapshots that are held.", stats.bytes_held),
        ]
        counters = [
            ("state_snapshot_queries", "Admissions that looked for a snapshot.", stats.num_lookups),
            ("state_snapshot_hits", "Admissions that began from a snapshot.", stats.num_hits),
            ("state_snapshots_saved", "Snapshots taken.", stats.num_saved),
            ("state_snapshots_evicted", "Snapshots that gave way to others.", stats.num_evicted),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"pegainfer:{name}", text, labels=ENGINE_LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"pegainfer:{name}", text, labels=ENGINE_LABELS)
            counter.add_metric(labels, value)
            yield counter

    def _http_families(self) -> Iterator[Metric]:
        if not self._http_count:
            return
        count = CounterMetricFamily("http_requests", "HTTP requests.", labels=("method", "status", "handler"))
        for key, value in sorted(self._http_count.items()):
            count.add_metric(key, value)
        yield count
        seconds = HistogramMetricFamily("http_request_duration_seconds", "HTTP requests.", labels=("method", "handler"))
        for route, histogram in sorted(self._http_seconds.items()):
            histogram.add_to(seconds, route)
        yield seconds
