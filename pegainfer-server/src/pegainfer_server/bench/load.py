"""Drives one endpoint through one point, closed loop or open loop, from one process or several.

Owns when requests are sent, and the measure of the client's own part: its share of a CPU and how late its event loop runs. Does not know
what is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import msgspec

from pegainfer_server.bench.client import Endpoint, Exchange, HttpClient
from pegainfer_server.bench.records import RequestRecord, read
from pegainfer_server.bench.workload import Point, arrivals, prompts

HEARTBEAT = 0.01
"""Seconds between two looks at how late the event loop is."""
SPAWN_SECONDS = 2.0
"""What worker processes get to import before all of them begin at the same moment."""
PATH = "/v1/completions"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a point gave, and how busy the client was."""

    started: float
    records: list[RequestRecord]
    client_cpu: float
    """CPU seconds a second, of the busiest client process."""
    client_lag: list[float]
    """Seconds by which the client's event loops woke too late."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One client process's part of a point."""

    endpoint: Endpoint
    bodies: list[bytes]
    offsets: list[float] | None
    """When to send each, in seconds after the start; None for a closed loop."""
    concurrency: int
    start_at: float | None
    """Of time.perf_counter, which all processes of a machine share; None: at once."""


def run_point(endpoint: Endpoint, point: Point, token_ids: range, workers: int = 1) -> LoadResult:
    """Send the point's requests and wait for all answers. A failed request is a record with an error."""
    bodies = [request_body(endpoint.model, prompt, point.output_tokens) for prompt in prompts(point, token_ids)]
    shares = split(endpoint, point, bodies, workers)
    if len(shares) == 1:
        parts = [run_share(shares[0])]
    else:
        start_at = time.perf_counter() + SPAWN_SECONDS
        timed = [dataclasses.replace(share, start_at=start_at) for share in shares]
        with ProcessPoolExecutor(len(shares), mp_context=multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(run_share, timed))
    return LoadResult(
        started=min(part.started for part in parts),
        records=[
            read(exchange, point.input_tokens, point.output_tokens) for part in parts for exchange in part.exchanges
        ],
        client_cpu=max(part.cpu for part in parts),
        client_lag=[lag for part in parts for lag in part.lag],
    )


def request_body(model: str, prompt: list[int], output_tokens: int) -> bytes:
    """A greedy streamed completion of exactly `output_tokens`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(body)


def split(endpoint: Endpoint, point: Point, bodies: list[bytes], workers: int) -> list[Share]:
    """The point's requests dealt out to `workers` processes, or fewer if there is not that much to do at a time."""
    offsets = arrivals(point) if point.mode == "open" else None
    if offsets is None:
        workers = min(workers, point.concurrency)
    shares = []
    for index in range(workers):
        own = bodies[index::workers]
        concurrency = len(own)
        if offsets is None:
            concurrency = point.concurrency // workers + (index < point.concurrency % workers)
        own_offsets = None if offsets is None else offsets[index::workers]
        shares.append(Share(endpoint=endpoint, bodies=own, offsets=own_offsets, concurrency=concurrency, start_at=None))
    return [share for share in shares if share.bodies]


@dataclasses.dataclass(frozen=True, slots=True)
class ShareResult:
    """What one client process saw."""

    started: float
    exchanges: list[Exchange]
    cpu: float
    lag: list[float]


def run_share(share: Share) -> ShareResult:
    """Run one share in this process; also the entry of a worker process."""
    return run_loop(_run_share(share))


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.run(work)
    return uvloop.run(work)


async def _run_share(share: Share) -> ShareResult:
    client = HttpClient(share.endpoint)
    if share.start_at is not None:
        await asyncio.sleep(share.start_at - time.perf_counter())
    lag: list[float] = []
    watching = asyncio.create_task(_watch(lag))
    started, cpu_before = time.perf_counter(), time.process_time()
    try:
        work = _closed(client, share) if share.offsets is None else _open(client, share, share.offsets, started)
        exchanges = await work
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        client.close()
    seconds = time.perf_counter() - started
    return ShareResult(started, exchanges, (time.process_time() - cpu_before) / seconds, lag)


async def _closed(client: HttpClient, share: Share) -> list[Exchange]:
    """As many requests in flight as the concurrency says, until all are done."""
    waiting: Iterator[bytes] = iter(share.bodies)
    exchanges: list[Exchange] = []

    async def user() -> None:
        for body in waiting:
            exchanges.append(await client.post(PATH, body))

    await asyncio.gather(*(user() for _ in range(share.concurrency)))
    return exchanges


async def _open(client: HttpClient, share: Share, offsets: list[float], started: float) -> list[Exchange]:
    """Each request at its own time, however many are in flight."""
    tasks: list[asyncio.Task[Exchange]] = []
    for offset, body in zip(offsets, share.bodies, strict=True):
        delay = started + offset - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(client.post(PATH, body)))
    return list(await asyncio.gather(*tasks))


async def _watch(lag: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(HEARTBEAT)
        lag.append(time.perf_counter() - before - HEARTBEAT)
