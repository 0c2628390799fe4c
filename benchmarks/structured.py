"""What structured output costs: streams that a JSON schema binds beside free ones, on one server, one run after the other.

    python benchmarks/structured.py [MODEL] --out FILE     MODEL: a checkpoint directory, by default SmolLM2-135M-Instruct

Both kinds of streams produce the same number of tokens: the free ones ignore EOS, the bound ones have an array to write that is never
long enough. Runs of the two kinds alternate, and the medians of their rates are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from pegainfer_server.bench.provenance import provenance
from pegainfer_server.bench.report import document, finish, show
from pegainfer_server.bench.server_process import ServerProcess

GOAL = 0.85
"""The rate of bound streams is to be at least this part of the free ones'."""
SCHEMA = {
    "type": "array",
    "minItems": 5000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "sold"]}, "maxItems": 3},
            "price": {"type": ["number", "null"]},
        },
        "required": ["name", "age", "tags", "price"],
        "additionalProperties": False,
    },
}
PROMPT = "A list of people, as JSON, number {}:\n"
CASES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 0.8, "top_p": 0.95}}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "bound": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
}
COLUMNS = (
    ("case", "case"),
    ("streams", "streams"),
    ("free tok/s", "free"),
    ("bound tok/s", "bound"),
    ("ratio", "ratio"),
    ("by CPU time", "cpu_ratio"),
)


async def run(url: str, streams: int, tokens: int, fields: dict[str, Any], seed: int) -> float:
    """Tokens a second of streams that are all there at the same time."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=streams)) as http:
        begun = time.perf_counter()
        counts = await asyncio.gather(*(stream(http, n, tokens, fields, seed) for n in range(streams)))
        return sum(counts) / (time.perf_counter() - begun)


async def stream(http: httpx.AsyncClient, number: int, tokens: int, fields: dict[str, Any], seed: int) -> int:
    """One answer, read to its end; the tokens that its usage says."""
    body = {"prompt": PROMPT.format(number), "max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    usage = None
    async with http.stream("POST", "/v1/completions", json=body | options | fields) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: "))["usage"] or usage
    if usage is None or usage["completion_tokens"] != tokens:
        raise SystemExit(f"stream {number} had usage {usage}; {tokens} tokens were asked for")
    return tokens


def cpu_seconds(server: psutil.Process) -> float:
    """Of the server and its engine so far: what others on the machine do hardly changes it."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(url: str, server: psutil.Process, case: str, streams: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Rates of both kinds, in turn; the first run of each is not counted."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(repeats + 1):
        for kind, fields in KINDS.items():
            before = cpu_seconds(server)
            rate = asyncio.run(run(url, streams, tokens, CASES[case] | fields, repeat))
            if repeat:
                rates[kind].append(round(rate, 2))
                cpu_ms[kind].append(round((cpu_seconds(server) - before) * 1e3 / (streams * tokens), 3))
    free, bound = (statistics.median(rates[kind]) for kind in KINDS)
    free_cpu, bound_cpu = (statistics.median(cpu_ms[kind]) for kind in KINDS)
    return {
        "case": case,
        "streams": streams,
        "output_tokens": tokens,
        "free": free,
        "bound": bound,
        "ratio": round(bound / free, 3),
        # a short run may take less than the tick of the process clock
        "cpu_ratio": round(free_cpu / bound_cpu, 3) if bound_cpu else None,
        "rates": rates,
        "cpu_ms_per_token": cpu_ms,
    }


def default_model() -> Path:
    """SmolLM2-135M-Instruct."""
    from pegainfer_llama.smollm2 import ensure_checkpoint

    return ensure_checkpoint()


def main() -> None:
    """Serve, measure, and tell; exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    source = provenance("structured", vars(arguments))
    model = arguments.model or default_model()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from pegainfer_server.cli import main; sys.exit(main())"]
    command += ["serve", str(model), "--port", str(port), "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    with ServerProcess(command, url) as server:
        server.wait_ready(300)
        process = psutil.Process(server.pid)
        sizes = (arguments.streams, arguments.tokens, arguments.repeats)
        rows = [measure(url, process, case, *sizes) for case in CASES]
    show("structured output: tokens a second of all streams", rows, COLUMNS)
    missed = [f"{row['case']}: {row['ratio']} of the free streams' rate" for row in rows if row["ratio"] < GOAL]
    finish(document("structured", source, points=rows), arguments.out, missed)


if __name__ == "__main__":
    main()
