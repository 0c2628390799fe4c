"""A soak: a mix of valid, invalid and dropped requests for a given time, with a canary beside it.

Owns the run, the canary and what must be true afterwards: the canary's greedy answer is what it was, nothing ended otherwise than it
should, and the gauges are back where they were. The server must have no other clients meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter
from typing import Any

import httpx
import msgspec
from pegainfer_core.errors import PegainferError

from pegainfer_server.bench.client import Endpoint, Exchange, HttpClient
from pegainfer_server.bench.load import run_loop
from pegainfer_server.bench.records import OK
from pegainfer_server.bench.report import Columns, kinds_of
from pegainfer_server.bench.samples import summarize
from pegainfer_server.bench.soak_requests import COMPLETIONS, FEATURES, KINDS, Kind, RequestMix, SoakRequest
from pegainfer_server.bench.soak_verdict import complaint, refused

SOAK_COLUMNS: Columns = (
    ("requests", "kind"),
    ("sent", "sent"),
    ("as expected", "expected"),
    ("refused, full", "refused"),
    ("wrong", "wrong"),
    ("p50 ms", "ms.p50"),
    ("p99 ms", "ms.p99"),
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
CANARY_SECONDS = 1.0
"""Between two looks at the canary."""
SETTLE_SECONDS = 30.0
"""What the gauges get to come back."""
POLL_SECONDS = 0.1
ANSWER_SECONDS = 60.0


@dataclasses.dataclass(slots=True)
class Tally:
    """What came back for one kind of request."""

    sent: int = 0
    expected: int = 0
    refused: int = 0
    statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    names: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def row(self, kind: Kind) -> dict[str, Any]:
        """For the table and the file."""
        return {
            "kind": kind,
            "sent": self.sent,
            "expected": self.expected,
            "refused": self.refused,
            "wrong": len(self.wrong),
            "errors": kinds_of(self.wrong),
            "statuses": dict(sorted(self.statuses.items())),
            "names": dict(sorted(self.names.items())),
            "ms": summarize(self.seconds),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy answer: its tokens, and by how much each was ahead of the next best, in nat."""

    tokens: tuple[str, ...]
    margins: tuple[float, ...]

    def difference(self, other: Greedy) -> float | None:
        """This answer's margin where the other first differs; None if it does not. Infinite if one is only longer."""
        if self.tokens == other.tokens:
            return None
        pairs = zip(self.tokens, other.tokens, self.margins, strict=False)
        return next((margin for mine, theirs, margin in pairs if mine != theirs), float("inf"))


class Canary:
    """The same greedy request again and again. A change within `margin` of a tie is told, and is no failure."""

    def __init__(self, http: HttpClient, model: str, prompt: list[int], tokens: int, margin: float) -> None:
        fields = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 2}
        self._body = msgspec.json.encode({"model": model, "prompt": prompt, **fields})
        self._http = http
        self._margin = margin
        self._answer: Greedy | None = None
        self.asked = self.near_ties = 0
        self.failures: Counter[str] = Counter()
        self.seconds: list[float] = []

    async def learn(self) -> None:
        """Take the answer of an idle server; twice, so that it comes from a warm prefix as later ones do. Raises PegainferError."""
        for _ in range(2):
            exchange = await self._http.post(COMPLETIONS, self._body)
            self._answer = _greedy(exchange)
        if self._answer is None or not self._answer.tokens:
            raise PegainferError(f"the canary was not answered: {_told(exchange)}")

    async def check(self, when: str) -> None:
        """Ask once more and compare."""
        assert self._answer is not None, "learned"
        self.asked += 1
        exchange = await self._http.post(COMPLETIONS, self._body)
        self.seconds.append(exchange.ended - exchange.sent)
        answer = _greedy(exchange)
        if answer is None:
            self.failures[f"{when}: {_told(exchange)}"] += 1
            return
        margin = self._answer.difference(answer)
        if margin is not None and margin <= self._margin:
            self.near_ties += 1
        elif margin is not None:
            self.failures[f"{when}: another answer, where the margin was {margin:.3g} nat"] += 1

    def figures(self) -> dict[str, Any]:
        """For the file."""
        return {
            "asked": self.asked,
            "changed_at_near_ties": self.near_ties,
            "margin": self._margin,
            "failures": dict(self.failures),
            "ms": summarize(self.seconds),
        }


class Soak:
    """One soak of one endpoint."""

    def __init__(self, endpoint: Endpoint, mix: RequestMix, canary_prompt: list[int], margin: float, seed: int) -> None:
        self._endpoint = endpoint
        self._mix = mix
        self._http = HttpClient(endpoint)
        self._canary = Canary(self._http, endpoint.model, canary_prompt, 24, margin)
        self._rng = random.Random(seed)
        self._tallies: dict[Kind, Tally] = {kind: Tally() for kind in KINDS}
        self._unhealthy: Counter[str] = Counter()

    def run(self, seconds: float, concurrency: int) -> dict[str, Any]:
        """Soak; the figures. Raises PegainferError if the server does not even answer the canary."""
        return run_loop(self._run_and_close(seconds, concurrency))

    async def _run_and_close(self, seconds: float, concurrency: int) -> dict[str, Any]:
        try:
            return await self._run(seconds, concurrency)
        finally:
            self._http.close()

    async def _run(self, seconds: float, concurrency: int) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"} if self._endpoint.api_key else {}
        async with httpx.AsyncClient(base_url=self._endpoint.root, headers=headers, timeout=ANSWER_SECONDS) as side:
            await self._canary.learn()
            await self._find_features()
            before = await self._settled(side, None)
            begun = time.perf_counter()
            deadline = begun + seconds
            watching = asyncio.create_task(self._watch(side))
            try:
                await asyncio.gather(*(self._user(deadline) for _ in range(concurrency)))
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
            lasted = time.perf_counter() - begun
            after = await self._settled(side, before)
            await self._canary.check("afterwards")
            await self._look_at_health(side)
        return self._figures(lasted, before, after)

    async def _find_features(self) -> None:
        for feature in FEATURES:
            request = self._mix.probe(feature)
            if (await self._http.post(request.path, request.body)).status == OK:
                self._mix.features.add(feature)

    async def _user(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            request = self._mix.next()
            tally = self._tallies[request.kind]
            tally.sent += 1
            tally.names[request.name] += 1
            if request.kind == "dropped":
                await self._drop(request, tally)
            else:
                self._judge(request, await self._http.post(request.path, request.body), tally)

    async def _drop(self, request: SoakRequest, tally: Tally) -> None:
        """Leave at a random moment, up to twice the time of a canary."""
        patience = self._rng.uniform(0, 2 * max(self._canary.seconds[-5:], default=0.5))
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(patience):
                exchange = await self._http.post(request.path, request.body)
        except TimeoutError:
            tally.statuses["dropped"] += 1
            tally.expected += 1
            tally.seconds.append(time.perf_counter() - begun)
        else:
            self._judge(request, exchange, tally)

    def _judge(self, request: SoakRequest, exchange: Exchange, tally: Tally) -> None:
        tally.statuses[str(exchange.status)] += 1
        tally.seconds.append(exchange.ended - exchange.sent)
        wrong = complaint(request, exchange)
        if wrong is not None:
            tally.wrong.append(wrong)
        elif refused(exchange):
            tally.refused += 1
        else:
            tally.expected += 1

    async def _watch(self, side: httpx.AsyncClient) -> None:
        while True:
            await self._canary.check("under load")
            await self._look_at_health(side)
            await asyncio.sleep(CANARY_SECONDS)

    async def _look_at_health(self, side: httpx.AsyncClient) -> None:
        try:
            status = str((await side.get("/health")).status_code)
        except httpx.HTTPError as error:
            status = repr(error)
        if status != str(OK):
            self._unhealthy[status] += 1

    async def _settled(self, side: httpx.AsyncClient, wanted: dict[str, float] | None) -> dict[str, float] | None:
        """The gauges once they are as wanted, or as they are when that takes too long; None for a server without them."""
        deadline = time.perf_counter() + SETTLE_SECONDS
        while True:
            found = await _gauges(side)
            if found is None or wanted is None or found == wanted or time.perf_counter() > deadline:
                return found
            await asyncio.sleep(POLL_SECONDS)

    def _figures(
        self, lasted: float, before: dict[str, float] | None, after: dict[str, float] | None
    ) -> dict[str, Any]:
        rows = [tally.row(kind) for kind, tally in self._tallies.items()]
        failures = [f"{row['kind']}: {count} times {text}" for row in rows for text, count in row["errors"].items()]
        failures += [f"canary: {count} times {text}" for text, count in self._canary.failures.items()]
        failures += [f"health: {count} times {text}" for text, count in self._unhealthy.items()]
        if before != after:
            failures.append(f"gauges: {before} before, {after} afterwards")
        return {
            "seconds": round(lasted, 2),
            "features": sorted(self._mix.features),
            "rows": rows,
            "canary": self._canary.figures(),
            "gauges": {"before": before, "after": after},
            "failures": failures,
        }


def _greedy(exchange: Exchange) -> Greedy | None:
    """The canary's answer; None if there is none."""
    if exchange.failure is not None or exchange.status != OK:
        return None
    try:
        data = msgspec.json.decode(b"".join(piece for _, piece in exchange.pieces))
        logprobs = data["choices"][0]["logprobs"]
        margins = []
        for entries in logprobs["top_logprobs"]:
            best = sorted(entries.values(), reverse=True)
            margins.append(best[0] - best[1] if len(best) > 1 else 0.0)
        return Greedy(tuple(logprobs["tokens"]), tuple(margins))
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return None


def _told(exchange: Exchange) -> str:
    body = b"".join(piece for _, piece in exchange.pieces)
    return exchange.failure or f"HTTP {exchange.status}: {body[:200].decode('utf-8', 'replace')}"


async def _gauges(side: httpx.AsyncClient) -> dict[str, float] | None:
    answer = await side.get("/metrics")
    found: dict[str, float] = {}
    for line in answer.text.splitlines() if answer.status_code == OK else ():
        name = line.removeprefix("vllm:").partition("{")[0]
        if line.startswith("vllm:") and name in GAUGES:
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found or None
