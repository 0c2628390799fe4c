"""Many concurrent streams through one API process over an engine that takes no time: none lost, none mixed up, no memory kept.

Every stream has a prompt of its own, which the engine repeats, so each answer says whose it is. The engine holds all tokens back
until every stream of a round is open. Rounds follow each other on new connections; the first one warms up allocators and caches, and
what counts is what the process keeps after the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from http_layer import ASCII_IDS, MODEL

PROMPT_TOKENS = 16
SPARE_FILES = 64
"""What a process has open besides its connections."""
MIB = 2**20


def raise_file_limit(streams: int) -> None:
    """Allow this process, and those it starts, a connection for each stream. Raises SystemExit if the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(f"{streams} streams need {needed} open files, and this system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def prompts(streams: int, seed: int) -> list[list[int]]:
    """Prompts that differ from each other in many places."""
    rng = random.Random(seed)
    return [[rng.choice(ASCII_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]


def expected_texts(all_prompts: list[list[int]], tokens: int) -> list[str]:
    """What each stream must say: its prompt, again and again."""
    from pegainfer_core.testing.tiny_tokenizer import write_tiny_tokenizer
    from pegainfer_core.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    return [tokenizer.decode([prompt[k % len(prompt)] for k in range(tokens)]) for prompt in all_prompts]


def text_of(exchange: Any) -> str | None:
    """The joined text of a complete stream; None if it was not complete."""
    from pegainfer_server.bench.records import events

    if exchange.failure is not None or exchange.status != 200:
        return None
    datas = [data for _, data in events(exchange.pieces)]
    if not datas or datas[-1] != b"[DONE]":
        return None
    chunks = [msgspec.json.decode(data) for data in datas[:-1]]
    if any("error" in chunk for chunk in chunks):
        return None
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def run_round(endpoint: Any, streams: int, tokens: int, seed: int) -> dict[str, Any]:
    """Open all streams at once; counts of what came back."""
    from pegainfer_server.bench.client import HttpClient
    from pegainfer_server.bench.load import PATH, request_body
    from pegainfer_server.bench.records import events
    from pegainfer_server.bench.samples import summarize

    own = prompts(streams, seed)
    bodies = [request_body(MODEL, prompt, tokens) for prompt in own]
    client = HttpClient(endpoint)
    begun = time.perf_counter()
    exchanges = await asyncio.gather(*(client.post(PATH, body) for body in bodies))
    seconds = time.perf_counter() - begun
    client.close()
    texts = [text_of(exchange) for exchange in exchanges]
    wanted = expected_texts(own, tokens)
    firsts = [next(events(exchange.pieces))[0] for exchange in exchanges if exchange.pieces]
    release = min(firsts, default=begun)
    return {
        "streams": streams,
        "complete": sum(text is not None for text in texts),
        "lost": sum(text is None for text in texts),
        "mixed_up": sum(text is not None and text != want for text, want in zip(texts, wanted, strict=True)),
        "seconds": round(seconds, 3),
        "all_open_after_s": round(release - begun, 3),
        "tokens_s": round(streams * tokens / (begun + seconds - release), 1),
        "first_event_ms": summarize([first - release for first in firsts]),
    }


def gauges(root: str) -> dict[str, float]:
    """Running and waiting requests and KV use, as /metrics tells."""
    import httpx

    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = httpx.get(f"{root}/metrics", timeout=30).text.splitlines()
    return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")) for name in names}


def memory(root: str) -> dict[str, int]:
    """What the server holds: living objects, resident bytes."""
    import httpx

    found: dict[str, int] = httpx.get(f"{root}/memory", timeout=60).raise_for_status().json()
    return found


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds against one server process."""
    import psutil
    from pegainfer_server.bench.client import Endpoint
    from pegainfer_server.bench.load import run_loop
    from pegainfer_server.bench.server_process import ServerProcess

    streams = arguments.streams
    raise_file_limit(streams)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    layer = str(Path(__file__).with_name("http_layer.py"))
    command = [sys.executable, layer, "--serve", str(port), "--hold", str(streams)]
    endpoint = Endpoint("streams", f"http://127.0.0.1:{port}", MODEL)
    rows = []
    # Python's own allocator keeps arenas that hold one living object; C's gives back whatever is free
    environment = os.environ | {"PYTHONMALLOC": "malloc"}
    with ServerProcess(command, endpoint.root, environment) as server:
        server.wait_ready(60)
        process = psutil.Process(server.pid)
        for index in range(arguments.rounds):
            before = memory(endpoint.root)
            row = run_loop(run_round(endpoint, streams, arguments.tokens, arguments.seed + index))
            end = process.memory_info().rss
            row |= {"round": index, "gauges_after": gauges(endpoint.root)}
            after = memory(endpoint.root)
            row |= {
                "objects_before": before["objects"],
                "objects_after": after["objects"],
                "rss_before_mib": round(before["rss_bytes"] / MIB, 2),
                "rss_end_mib": round(end / MIB, 2),
                "rss_after_mib": round(after["rss_bytes"] / MIB, 2),
                "connections_after": sum(item.status == "ESTABLISHED" for item in process.net_connections("tcp")),
            }
            rows.append(row)
    return rows


def main() -> None:
    """Measure and report; exit code 1 if a stream was lost or mixed up."""
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import document, finish, show

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--streams", type=int, default=1000, help="open at the same time")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = measure(arguments)
    columns = [
        (name, name)
        for name in (
            "round",
            "streams",
            "complete",
            "mixed_up",
            "objects_after",
            "rss_before_mib",
            "rss_end_mib",
            "rss_after_mib",
        )
    ]
    show("concurrent streams over an instant engine", rows, columns)
    content = document("streams", provenance("streams", vars(arguments)), rounds=rows)
    finish(content, arguments.out)
    raise SystemExit(any(row["lost"] or row["mixed_up"] for row in rows))


if __name__ == "__main__":
    main()
