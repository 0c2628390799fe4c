"""/metrics: what happened, under the expected names; nothing that is not fed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pegainfer_core.errors import ConfigError
from pegainfer_core.messages import EngineStats, SnapshotStats, StepOutputs
from pegainfer_server.histogram import Histogram
from pegainfer_server.sampling import defaults_from_generation_config
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

Serve = Callable[..., Awaitable[Any]]
LABELS = {"model_name": "tiny", "engine": "0"}


async def scrape(served: Any) -> dict[str, float]:
    """Sample name -> value, for the labels of the engine; finish reasons and buckets are appended to the name."""
    response = await served.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            extra = {name: value for name, value in sample.labels.items() if LABELS.get(name) != value}
            name = sample.name + "".join(f"|{value}" for _, value in sorted(extra.items()))
            samples[name] = sample.value
    return samples


async def test_finished_requests(served: Any) -> None:
    served.answers("one two")
    tokens = len(served.tokenizer.encode("one two"))
    await served.complete(prompt=[300] * 20)
    samples = await scrape(served)
    assert samples["vllm:request_success_total|stop"] == 1
    assert samples["vllm:prompt_tokens_total"] == 20
    assert samples["vllm:prompt_tokens_cached_total"] == samples["vllm:prefix_cache_hits_total"] == 16
    assert samples["vllm:prefix_cache_queries_total"] == 20
    assert samples["vllm:generation_tokens_total"] == tokens
    assert samples["vllm:num_preemptions_total"] == 0
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_prefill_kv_computed_tokens",
        "request_params_max_tokens",
        "request_params_n",
    ):
        assert samples[f"vllm:{name}_count"] == 1, name
    assert samples["vllm:inter_token_latency_seconds_count"] == tokens - 1
    assert samples["vllm:request_queue_time_seconds_sum"] == 0.25
    assert samples["vllm:request_prefill_time_seconds_sum"] == 0.5
    decode = samples["vllm:request_decode_time_seconds_sum"]
    assert samples["vllm:request_inference_time_seconds_sum"] == 0.5 + decode > 0.5
    assert samples["vllm:request_prompt_tokens_sum"] == 20
    assert samples["vllm:request_generation_tokens_sum"] == tokens + 1
    assert samples["vllm:request_prefill_kv_computed_tokens_sum"] == 4
    assert samples["vllm:iteration_tokens_total_sum"] == tokens
    assert samples["http_requests_total|/v1/completions|POST|2xx"] == 1
    assert samples["http_request_duration_seconds_count|/v1/completions|POST"] == 1


async def test_reasons(served: Any) -> None:
    served.answers("one two")
    await served.complete(max_tokens=1)
    await served.complete(stop="tw")
    served.engine.rejection = ("queue_full", "full")
    await served.http.post("/v1/completions", json={"prompt": "a"})
    served.engine.rejection = None
    served.engine.auto = False
    work = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a"}))
    while not served.engine.open_ids:
        await asyncio.sleep(0)
    samples = await scrape(served)
    assert samples["vllm:num_requests_running"] == 0  # no step has told of it yet
    served.engine.step()
    samples = await scrape(served)
    assert samples["vllm:num_requests_running"] == 1 and samples["vllm:kv_cache_usage_perc"] == pytest.approx(0.01)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    served.engine.step()
    samples = await scrape(served)
    assert samples["vllm:num_requests_running"] == samples["vllm:kv_cache_usage_perc"] == 0
    reasons = {name.partition("|")[2]: value for name, value in samples.items() if "request_success_total" in name}
    assert reasons == {"length": 1, "stop": 1, "error": 1, "abort": 1}
    assert samples["http_requests_total|/v1/completions|POST|4xx"] == 1


async def test_nothing_is_reported_before_it_is_fed(serve: Serve) -> None:
    served = await serve(ready=False)
    assert await scrape(served) == {}
    await served.engine.start()
    samples = await scrape(served)
    assert {name.partition("|")[0] for name in samples} == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    }
    served.engine.died("gone")
    assert await scrape(served) == {}


async def test_acts_of_steps(serve: Serve) -> None:
    served = await serve()
    assert "pegainfer:engine_step_seconds_count|plan" not in await scrape(served)
    for seconds in ((0.0001, 0.002, 0.0003), (0.0002, 0.004, 0.0001)):
        served.engine.dispatch(StepOutputs([], EngineStats(), 5, seconds))
    served.engine.dispatch(StepOutputs([], EngineStats(), 0))
    samples = await scrape(served)
    for act, total in (("plan", 0.0003), ("run", 0.006), ("commit", 0.0004)):
        assert samples[f"pegainfer:engine_step_seconds_count|{act}"] == 2
        assert samples[f"pegainfer:engine_step_seconds_sum|{act}"] == pytest.approx(total)
    assert samples["pegainfer:engine_step_seconds_bucket|run|0.002"] == 1


async def test_no_prefix_cache_no_counters_of_it(serve: Serve) -> None:
    served = await serve(prefix_cache=False)
    assert not [name for name in await scrape(served) if "cache_" in name and "kv_cache" not in name]


async def test_unknown_paths_share_one_label(served: Any) -> None:
    for path in ("/nope", "/other"):
        await served.http.get(path)
    samples = await scrape(served)
    assert samples["http_requests_total|none|GET|4xx"] == 2


async def test_models_by_name_share_one_label(served: Any) -> None:
    await served.http.get("/v1/models/tiny")
    samples = await scrape(served)
    assert samples["http_requests_total|/v1/models/{name:path}|GET|2xx"] == 1


def test_histogram_counts_into_inclusive_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    family = HistogramMetricFamily("x", "x", labels=())
    histogram.add_to(family, ())
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name == "x_bucket"}
    assert buckets == {"1.0": 2.0, "2.0": 4.0, "+Inf": 5.0}
    assert {sample.name: sample.value for sample in family.samples if not sample.labels} == {
        "x_count": 5.0,
        "x_sum": 8.0,
    }


def test_sampling_defaults_of_a_checkpoint() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "do_sample": True, "eos_token_id": [1, 2]}
    assert defaults_from_generation_config(config) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults_from_generation_config({}) == {}
    for bad in ({"temperature": "hot"}, {"top_p": 2.0}, {"top_k": 1.5}, {"temperature": True}):
        with pytest.raises(ConfigError, match=f"generation_config.json: {next(iter(bad))}"):
            defaults_from_generation_config(bad)


async def test_snapshots_of_recurrent_state_where_a_model_has_one(served: Any) -> None:
    assert not [name for name in await scrape(served) if "snapshot" in name]
    stats = SnapshotStats(3, 8, 3000, 20, 15, 9, 6)
    served.engine.dispatch(StepOutputs([], EngineStats(snapshots=stats), 1))
    found = {name: value for name, value in (await scrape(served)).items() if "snapshot" in name}
    assert found == {
        "pegainfer:state_snapshots": 3,
        "pegainfer:state_snapshot_slots": 8,
        "pegainfer:state_snapshot_bytes": 3000,
        "pegainfer:state_snapshot_queries_total": 20,
        "pegainfer:state_snapshot_hits_total": 15,
        "pegainfer:state_snapshots_saved_total": 9,
        "pegainfer:state_snapshots_evicted_total": 6,
    }
