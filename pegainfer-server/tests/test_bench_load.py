"""The load client against a real HTTP server over a scripted engine: counts, concurrency, arrivals, failures."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from pegainfer_core.errors import PegainferError
from pegainfer_core.messages import AddRequest, ToEngine
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_core.testing.tiny_tokenizer import EOS_ID
from pegainfer_core.tokenizer import Tokenizer
from pegainfer_server.app import create_app
from pegainfer_server.bench import engine_facts
from pegainfer_server.bench.client import Endpoint
from pegainfer_server.bench.load import run_point, split
from pegainfer_server.bench.prefix_bench import run_prefix
from pegainfer_server.bench.report import error_counts, load_figures
from pegainfer_server.bench.serve_bench import run_points
from pegainfer_server.bench.workload import Point, prompts
from pegainfer_server.cli import main
from pegainfer_server.state import ServerState

IDS = range(300, 500)
"""Pieces of words in the tiny tokenizer."""


class WatchedEngine(FakeEngineClient):
    """Repeats prompts and remembers how many requests were open at a time."""

    most_open = 0

    def send(self, message: ToEngine) -> None:
        """See EngineClient."""
        super().send(message)
        if isinstance(message, AddRequest):
            self.most_open = max(self.most_open, len(self.open_ids))


class Server:
    """A server in a thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.engine = WatchedEngine(fake_info(tokenizer.vocab_size, [EOS_ID]))
        state = ServerState(client=self.engine, model_names=("tiny",), tokenizer=tokenizer, api_keys=("secret",))
        config = uvicorn.Config(create_app(state), log_config=None, access_log=False)
        self.http = uvicorn.Server(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=asyncio.run, args=(self.run(),))

    async def run(self) -> None:
        await self.engine.start()
        await self.http.serve(sockets=[self.listener])

    def endpoint(self, name: str = "a") -> Endpoint:
        return Endpoint(name, self.url, "tiny", "secret")


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Server]:
    server = Server(tokenizer)
    server.thread.start()
    yield server
    server.http.should_exit = True
    server.thread.join()


def closed(concurrency: int, num_requests: int, output_tokens: int = 6) -> Point:
    return Point(
        mode="closed",
        load=concurrency,
        input_tokens=20,
        output_tokens=output_tokens,
        num_requests=num_requests,
        seed=(1, 0),
    )


def poisson(num_requests: int) -> Point:
    return Point(mode="open", load=200, input_tokens=20, output_tokens=6, num_requests=num_requests, seed=(1, 0))


def test_closed_loop_keeps_the_concurrency(server: Server) -> None:
    point = closed(3, 10)
    result = run_point(server.endpoint(), point, IDS)
    assert [record.error for record in result.records] == [None] * 10
    assert server.engine.most_open <= 3
    sent = sorted(list(request.prompt_ids) for request in server.engine.requests)
    assert sent == sorted(prompts(point, IDS))
    params = server.engine.requests[0].params
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 6, True)
    for record in result.records:
        assert record.output_tokens == 6
        assert record.sent <= record.token_times[0] <= record.token_times[-1] <= record.ended


def test_open_loop_sends_all_at_their_times(server: Server) -> None:
    result = run_point(server.endpoint(), poisson(12), IDS)
    assert [record.error for record in result.records] == [None] * 12
    assert all(record.sent >= result.started for record in result.records)


def test_worker_processes_share_the_work(server: Server) -> None:
    result = run_point(server.endpoint(), closed(4, 9), IDS, workers=2)
    assert [record.error for record in result.records] == [None] * 9
    assert len({tuple(request.prompt_ids) for request in server.engine.requests}) == 9


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_split_loses_nothing(workers: int) -> None:
    bodies = [str(index).encode() for index in range(10)]
    shares = split(Endpoint("a", "http://h", "m"), closed(5, 10), bodies, workers)
    assert sorted(body for share in shares for body in share.bodies) == sorted(bodies)
    assert sum(share.concurrency for share in shares) == 5
    arriving = split(Endpoint("a", "http://h", "m"), poisson(10), bodies, workers)
    offsets = [offset for share in arriving for offset in share.offsets or []]
    assert len(offsets) == len(set(offsets)) == 10


def test_figures_of_a_point(server: Server) -> None:
    point = closed(2, 4)
    figures = load_figures("a", point, run_point(server.endpoint(), point, IDS), keep_itl=True)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (4, 0, {})
    assert figures["tokens"]["output"] == 24
    assert figures["tokens"]["prompt"] == 80
    assert figures["output_tokens_s"] == pytest.approx(24 / figures["seconds"], rel=0.01)
    assert [figures[name]["count"] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")] == [4, 4, 20, 4]
    assert [len(column) for column in figures["requests"].values()] == [4] * 5
    assert figures["requests"]["sent_s"] == sorted(figures["requests"]["sent_s"])


def test_every_endpoint_gets_the_same_prompts(server: Server) -> None:
    rows = run_points([server.endpoint("a"), server.endpoint("b")], [closed(2, 4)], IDS, warm=False)
    assert [row["engine"] for row in rows] == ["a", "b"]
    sent = [tuple(request.prompt_ids) for request in server.engine.requests]
    assert sorted(sent[:4]) == sorted(sent[4:])


def test_refused_requests_are_counted_with_their_reason(server: Server) -> None:
    point = closed(2, 4)
    result = run_point(server.endpoint(), point, range(600, 900))
    figures = load_figures("a", point, result)
    assert (figures["completed"], figures["failed"]) == (0, 4)
    assert figures["ttft_ms"] is None
    ((reason, count),) = figures["errors"].items()
    assert "outside the vocabulary" in reason
    assert count == 4


def test_too_few_tokens_are_a_failure(server: Server) -> None:
    server.engine.tokens_per_step = 4
    records = run_point(server.endpoint(), closed(1, 2, output_tokens=120), IDS).records  # 20 + 120 exceed the context
    assert list(error_counts(records).values()) == [2]


def test_nobody_listening_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    result = run_point(Endpoint("a", f"http://127.0.0.1:{port}", "m"), closed(2, 3), IDS)
    assert sum(error_counts(result.records).values()) == 3


def test_a_server_that_hangs_up_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        result = run_point(Endpoint("a", f"http://127.0.0.1:{listener.getsockname()[1]}", "m"), closed(1, 1), IDS)
        thread.join()
    (record,) = result.records
    assert record.error is not None


def test_prefix_is_cold_once_and_warm_after(server: Server) -> None:
    (row,) = run_prefix([server.endpoint()], [32], IDS, num_prompts=2, warm=3, seed=5)
    assert row["cold_ttft_ms"]["count"] == 2
    assert row["warm_ttft_ms"]["count"] == 6
    assert row["cached_tokens"] == 16  # what the scripted engine says of every long prompt
    sent = [tuple(request.prompt_ids) for request in server.engine.requests]
    assert sent[0] == sent[1] == sent[2] == sent[3] != sent[4]


def test_prefix_needs_every_request(server: Server) -> None:
    with pytest.raises(PegainferError, match="a prompt of 32 tokens failed: HTTP 400"):
        run_prefix([server.endpoint()], [32], range(600, 900), num_prompts=1, warm=1, seed=5)


def test_facts_of_an_endpoint(server: Server) -> None:
    facts = engine_facts.ask(server.endpoint())
    assert facts["model"]["id"] == "tiny"
    assert facts["version"]
    assert engine_facts.only_model(server.url, "secret") == "tiny"
    with pytest.raises(PegainferError, match="serves 'tiny'"):
        engine_facts.ask(Endpoint("a", server.url, "other", "secret"))
    with pytest.raises(PegainferError, match="does not answer"):
        engine_facts.ask(Endpoint("a", server.url, "tiny"))  # without the key


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line of stdout as JSON, and stderr."""
    code = main(["bench", *arguments])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    return code, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}, printed.err


def test_serve_command_writes_file_table_and_last_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "serve.json"
    flags = ["--lengths", "20/6", "--concurrency", "1,2", "--rate", "100", "--seconds", "0.1", "--least", "2"]
    flags += ["--token-ids", "300:500", "--api-key", "secret", "--out", str(out)]
    code, last, err = run(capsys, "serve", "--url", server.url, *flags)
    assert code == 0, err
    content = json.loads(out.read_text())
    assert (content["schema"], content["kind"]) == (1, "serve")
    assert [point["load"] for point in content["points"]] == [1, 2, 100]
    assert content["engines"]["server"]["model"]["id"] == "tiny"
    assert last["points"][0]["ttft_ms"] == content["points"][0]["ttft_ms"]
    assert "requests" not in last["points"][0]
    assert "secret" not in out.read_text()
    assert str(tmp_path) not in out.read_text()
    assert content["provenance"]["flags"]["out"] == "serve.json"
    assert "TTFT p50" in err


def test_serve_command_fails_if_requests_fail(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "20/6", "--concurrency", "1", "--least", "1", "--api-key", "secret", "--no-warm-up"]
    code, last, err = run(capsys, "serve", "--url", server.url, *flags)
    assert code == 1
    assert last["points"][0]["failed"] == 4
    assert "outside the vocabulary" in err


def test_latency_and_prefix_commands(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--endpoint", f"one={server.url}", "--endpoint", f"two={server.url}/v1", "--token-ids", "300:500"]
    common += ["--api-key", "secret", "--seed", "4"]
    code, last, err = run(capsys, "latency", *common, "--lengths", "8/2,16/2", "--requests", "2")
    assert code == 0, err
    assert [(row["engine"], row["shape"]) for row in last["points"]] == [
        ("one", "8/2"),
        ("two", "8/2"),
        ("one", "16/2"),
        ("two", "16/2"),
    ]
    code, last, err = run(capsys, "prefix", *common, "--lengths", "32", "--prompts", "1", "--repeats", "2")
    assert code == 0, err
    assert [row["warm_ttft_ms"]["count"] for row in last["lengths"]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "--url or --endpoint"),
        (["serve", "--endpoint", "nourl"], "NAME=URL"),
        (["serve", "--url", "ftp://x", "--model", "m"], "no http or https URL"),
        (["serve", "--url", "http://x", "--lengths", "1024"], "IN/OUT"),
        (["serve", "--url", "http://x", "--concurrency", "1.5"], "whole numbers"),
        (["serve", "--url", "http://x", "--concurrency", "0"], "above 0"),
        (["serve", "--url", "http://x", "--concurrency", ""], "--concurrency or --rate"),
        (["serve", "--endpoint", "a=http://x", "--endpoint", "a=http://y", "--model", "m"], "name of its own"),
        (["latency", "--url", "http://x", "--model", "m", "--token-ids", "9:3"], "FIRST < END"),
        (["startup", "--page-cache", "cold", "--", "true"], "need --files"),
        (["startup", "--load", "0,8/8", "--", "true"], "N,IN/OUT"),
        (["step", "nowhere", "--rows", "x"], "whole numbers"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capsys, "plot", "x.json")
    assert code == 1
    assert "needs numpy, matplotlib: pip install 'pegainfer[bench]'" in err


def test_server_fixture_answers(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
