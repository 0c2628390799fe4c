"""Time to the first token of a prompt that the engine has seen before, by length.

Owns the order: a prompt cold once, then the same prompt again and again, for several prompts of each length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegainfer_core.errors import PegainferError

from pegainfer_server.bench.client import Endpoint, HttpClient
from pegainfer_server.bench.load import PATH, request_body, run_loop
from pegainfer_server.bench.records import RequestRecord, read
from pegainfer_server.bench.report import Columns
from pegainfer_server.bench.samples import summarize
from pegainfer_server.bench.workload import Point, prompts

PREFIX_COLUMNS: Columns = (
    ("engine", "engine"),
    ("prompt", "input_tokens"),
    ("cold p50 ms", "cold_ttft_ms.p50"),
    ("warm p50 ms", "warm_ttft_ms.p50"),
    ("p99", "warm_ttft_ms.p99"),
    ("cached", "cached_tokens"),
)
OUTPUT_TOKENS = 2


def run_prefix(
    endpoints: Sequence[Endpoint], lengths: Sequence[int], token_ids: range, *, num_prompts: int, warm: int, seed: int
) -> list[dict[str, Any]]:
    """Figures of each length and endpoint. Raises PegainferError if a request fails: a prefix figure needs all of them."""
    rows = []
    for index, length in enumerate(lengths):
        point = Point(
            mode="closed",
            load=1,
            input_tokens=length,
            output_tokens=OUTPUT_TOKENS,
            num_requests=num_prompts,
            seed=(seed, index),
        )
        for endpoint in endpoints:
            rows.append(run_loop(_one_length(endpoint, point, token_ids, warm)))
    return rows


async def _one_length(endpoint: Endpoint, point: Point, token_ids: range, warm: int) -> dict[str, Any]:
    client = HttpClient(endpoint)
    cold_records: list[RequestRecord] = []
    warm_records: list[RequestRecord] = []
    try:
        for prompt in prompts(point, token_ids):
            body = request_body(endpoint.model, prompt, point.output_tokens)
            cold_records.append(await _send(client, endpoint, body, point))
            warm_records += [await _send(client, endpoint, body, point) for _ in range(warm)]
    finally:
        client.close()
    cached = {record.cached_tokens for record in warm_records}
    return {
        "engine": endpoint.name,
        **point.as_json(),
        "warm_repeats": warm,
        "cold_ttft_ms": summarize([record.ttft for record in cold_records]),
        "warm_ttft_ms": summarize([record.ttft for record in warm_records]),
        "cached_tokens": cached.pop() if len(cached) == 1 else sorted(cached, key=str),
    }


async def _send(client: HttpClient, endpoint: Endpoint, body: bytes, point: Point) -> RequestRecord:
    record = read(await client.post(PATH, body), point.input_tokens, point.output_tokens)
    if record.error is not None:
        raise PegainferError(f"{endpoint.name}: a prompt of {point.input_tokens} tokens failed: {record.error}")
    return record
