"""Hostile values in every field of every route that a server's /openapi.json describes, beside a canary.

`python benchmarks/fuzz.py --url http://127.0.0.1:8000 --seconds 300 [--seed N]`. Fails (exit code 1) if an answer is a 5xx or none
at all, if the canary, a greedy completion asked for all the time, ever changes, or if the engine holds anything in the end. Knows no
field by name but those that keep answers short, so new fields and routes are fuzzed the day they are described.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx

CANARY = {"prompt": "The canary sings", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SHORT = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8}
"""Kept on most requests, so that a run is thousands of requests and not a few long ones."""
CONCURRENCY = 8
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 128, 129, 511, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40),
    *(0.0, -0.0, 1e-30, 0.5, 1.0, 1.5, 2.0, 999999.0, -1e308, 1e308, 5e-324),
    *(
        "",
        " ",
        "1",
        "a",
        "\x00",
        "\ud7ff\U0001f389",
        "<|im_end|>",
        "../../etc/passwd",
        "http://127.0.0.1:1/",
        "{{ 7 * 7 }}",
    ),
    *("auto", "none", "required", "text", "json_object", "user", "x" * 1025, "y" * 100_000),
    *([], [[]], [""], [None], [0], [-1], [2**40], ["a"] * 17, [0] * 5000, {}, {"": {}}, {"type": "text"}, DEEP),
    *({"type": "json_object"}, {"type": "nope"}, {"1": 100}, {"1": -100}, {"x": 1}, {str(i): 1 for i in range(400)}),
    {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    [{"role": "user", "content": "hi"}],
    [{"role": "tool", "content": None, "tool_calls": [{}]}],
    {"include_usage": True},
    {"type": "function", "function": {"name": "f"}},
    {"enable_thinking": True, "tokenize": False, "chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
    "(a+)+$",
    'start: "a"+',
]
RAW = (b"", b"{", b"null", b"[1]", b'{"a":NaN}', b"\xff\xfe", b'{"prompt":"\\ud800"}', b"[" * 100_000, b'{"a":' * 5000)


class Fuzz:
    """One run against one server."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []
        self.songs = 0
        self._song: str | None = None

    async def run(self, seconds: float) -> None:
        """Send until the time is over or something is wrong, then look at what is left in the engine."""
        document = (await self._client.get("/openapi.json")).raise_for_status().json()
        routes = {
            path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in document["paths"].items()
            if "post" in operations
        }
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sing(end))
            for _ in range(CONCURRENCY):
                group.create_task(self._attack(routes, end))
        await self._all_is_given_back()

    async def _sing(self, end: float) -> None:
        while time.monotonic() < end and not self.faults:
            response = await self._client.post("/v1/completions", json={**CANARY, "cache_salt": str(self.songs % 2)})
            if response.status_code == 429:
                continue
            song = response.json()["choices"][0]["text"] if response.status_code == 200 else response.text
            self._song = self._song or song
            self.songs += 1
            if response.status_code != 200 or song != self._song:
                self.faults.append(f"the canary changed: {self._song!r} became {song!r}")

    async def _attack(self, routes: dict[str, Any], end: float) -> None:
        while time.monotonic() < end and not self.faults:
            path = self._random.choice(sorted(routes))
            raw = self._raw(routes[path])
            try:
                await self._send(path, raw)
            except httpx.HTTPError as error:
                self.faults.append(f"{path} did not answer ({error!r}): {raw[:2000]!r}")

    async def _send(self, path: str, raw: bytes) -> None:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", path, content=raw, headers=headers) as response:
            self.statuses[(path, response.status_code)] += 1
            if response.status_code >= 500:
                text = (await response.aread()).decode(errors="replace")
                self.faults.append(f"{path} answered {response.status_code} {text[:500]}: {raw[:2000]!r}")
            elif self._random.random() < 0.8:  # the others hang up
                await response.aread()

    def _raw(self, schema: dict[str, Any]) -> bytes:
        """A body that is right but for up to three fields, or none at all."""
        draw = self._random
        if draw.random() < 0.05:
            return draw.choice(RAW)
        fields = schema.get("properties", {})
        body = {name: _usual(fields[name]) for name in schema.get("required", ())}
        if "messages" in fields and "prompt" in fields and not body:
            body["prompt"] = "Hello"
        body |= {name: value for name, value in SHORT.items() if name in fields and name != "max_completion_tokens"}
        for name in draw.sample([*sorted(fields), "no_such_field"], draw.randint(0, 3)):
            body[name] = self._value(fields.get(name, {}))
        return json.dumps(body).encode()

    def _value(self, schema: dict[str, Any]) -> Any:
        draw = self._random
        if draw.random() < 0.3:
            return _usual(schema)
        value = draw.choice(HOSTILE)
        return value if draw.random() < 0.8 else draw.choice([[value, value], {"a": value}, {"type": value}])

    async def _all_is_given_back(self) -> None:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        left: dict[str, float] = {}
        for _ in range(100):  # dropped requests end within a few steps
            lines = (await self._client.get("/metrics")).text.splitlines()
            left = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith(names)}
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
        if any(left.values()) or (await self._client.get("/health")).status_code != 200:
            self.faults.append(f"the engine did not come to rest: {left}")


def _usual(schema: dict[str, Any]) -> Any:
    """A value that fits a schema, in its plainest form."""
    if "anyOf" in schema:
        return _usual(schema["anyOf"][0])
    if "enum" in schema or "const" in schema:
        return schema.get("const", next(iter(schema.get("enum", [None]))))
    kind = schema.get("type")
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: _usual(fields.get(name, {})) for name in schema.get("required", ())}
    if kind == "array":
        return [_usual(schema.get("items", {}))] if schema.get("items") else []
    values: dict[Any, Any] = {"string": "Hello", "integer": 1, "number": 0.5, "boolean": True}
    return values.get(kind)


async def main(url: str, seconds: float, seed: int) -> int:
    """Run, tell in one line of JSON, and return the exit code."""
    limits = httpx.Limits(max_connections=CONCURRENCY + 2)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        fuzz = Fuzz(client, seed)
        await fuzz.run(seconds)
    statuses = Counter({status: 0 for _, status in fuzz.statuses})
    for (_, status), count in fuzz.statuses.items():
        statuses[status] += count
    facts = {
        "requests": fuzz.statuses.total(),
        "canaries": fuzz.songs,
        "seed": seed,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "answered_200": sorted(path for path, status in fuzz.statuses if status == 200),
        "faults": fuzz.faults,
    }
    print(json.dumps(facts))
    return 1 if fuzz.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.url, given.seconds, given.seed)))
