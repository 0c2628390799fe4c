"""`pegainfer bench soak`: a sound server passes, and each kind of fault is found and named."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.messages import AddRequest, FromEngine, ToEngine
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_core.testing.tiny_tokenizer import EOS_ID
from pegainfer_core.tokenizer import Tokenizer
from pegainfer_server.app import create_app
from pegainfer_server.bench import soak
from pegainfer_server.bench.client import Exchange
from pegainfer_server.bench.soak_requests import RequestMix, SoakRequest
from pegainfer_server.bench.soak_verdict import complaint
from pegainfer_server.cli import main
from pegainfer_server.state import ServerState
from starlette.types import Receive, Scope, Send

IDS = range(300, 500)
SOUND_REQUESTS = 12
"""After these the faults begin: the canary has been learned by then."""


class FaultyEngine(FakeEngineClient):
    """Repeats prompts. `changes` turns them around, `sticks` leaves a request in the gauges."""

    changes = sticks = False

    @property
    def faults_begin(self) -> bool:
        return len(self.requests) > SOUND_REQUESTS

    def send(self, message: ToEngine) -> None:
        """See EngineClient."""
        if isinstance(message, AddRequest) and self.changes and self.faults_begin:
            self.script = lambda request: request.prompt_ids[::-1]
        super().send(message)

    def dispatch(self, message: FromEngine) -> None:
        """See EngineClient."""
        super().dispatch(message)
        if self.sticks and self.faults_begin:
            self.stats = msgspec.structs.replace(self.stats, num_running=self.stats.num_running + 1)


class Server:
    """A server in a thread; `breaks` answers 500 to some requests."""

    def __init__(self, tokenizer: Tokenizer, checkpoint: Path) -> None:
        self.engine = FaultyEngine(fake_info(tokenizer.vocab_size, [EOS_ID], max_model_len=2048))
        chat = TemplateChatFormat(tokenizer, checkpoint)
        state = ServerState(client=self.engine, model_names=("tiny",), tokenizer=tokenizer, chat_format=chat)
        self.breaks: Callable[[Scope], bool] = lambda _: False
        self._app = create_app(state)
        config = uvicorn.Config(self.serve, interface="asgi3", log_config=None, access_log=False, lifespan="off")
        self.http = uvicorn.Server(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=asyncio.run, args=(self.run(),))

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.breaks(scope):
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"oh"})
        else:
            await self._app(scope, receive, send)

    async def run(self) -> None:
        await self.engine.start()
        await self.http.serve(sockets=[self.listener])


@pytest.fixture
def server(tokenizer: Tokenizer, checkpoint: Path) -> Iterator[Server]:
    server = Server(tokenizer, checkpoint)
    server.thread.start()
    yield server
    server.http.should_exit = True
    server.thread.join()


def run(server: Server, out: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    sizes = ["--seconds", "0.7", "--concurrency", "8", "--max-input", "40", "--max-output", "12", "--seed", "5"]
    command = ["bench", "soak", "--url", server.url, "--token-ids", "300:500", *sizes, "--out", str(out), *flags]
    assert main(command) == code
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_a_sound_server_passes(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run(server, tmp_path / "soak.json")
    assert content["failures"] == []
    rows = {row["kind"]: row for row in content["rows"]}
    assert set(rows) == {"valid", "invalid", "dropped"}
    assert all(row["sent"] == row["expected"] > 5 for row in rows.values())
    assert len(rows["invalid"]["names"]) > 5
    assert set(rows["invalid"]["statuses"]) <= {"400", "404", "415"}
    assert server.engine.aborted, "dropped requests reached the engine and were aborted"
    assert content["canary"]["asked"] >= 2
    assert set(content["gauges"]["after"].values()) == {0.0}
    assert {"chat", "logprobs", "several choices"} <= set(content["features"])
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1])["kind"] == "soak"
    assert "as expected" in output.err


@pytest.mark.parametrize(("margin", "passes"), [("0", False), ("1", True)])
def test_a_changed_canary_is_found_unless_it_was_a_near_tie(
    server: Server, tmp_path: Path, margin: str, passes: bool
) -> None:
    server.engine.changes = True  # the scripted engine's best two are log(3/2) apart everywhere
    content = run(server, tmp_path / "soak.json", "--margin", margin, code=0 if passes else 1)
    assert [text.startswith("canary: ") for text in content["failures"]] == [True] * len(content["failures"])
    assert bool(content["failures"]) != passes
    assert bool(content["canary"]["changed_at_near_ties"]) == passes


def test_margins_tell_ties_from_changes() -> None:
    answer = soak.Greedy(("a", "b", "c"), (3.0, 0.1, 2.0))
    assert answer.difference(answer) is None
    assert answer.difference(soak.Greedy(("a", "x", "y"), (3.0, 0.1, 2.0))) == 0.1
    assert answer.difference(soak.Greedy(("x", "b", "c"), (3.0, 0.1, 2.0))) == 3.0
    assert answer.difference(soak.Greedy(("a", "b"), (3.0, 0.1))) == float("inf")


def test_gauges_that_do_not_come_back_are_found(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.2)
    server.engine.sticks = True
    content = run(server, tmp_path / "soak.json", code=1)
    (failure,) = [text for text in content["failures"] if text.startswith("gauges")]
    assert "'num_requests_running': 1.0" in failure


@pytest.mark.parametrize(
    ("path", "told"), [("/v1/chat/completions", "HTTP 500"), ("/health", "health: "), ("/v1/completions", "canary")]
)
def test_a_server_error_is_found(server: Server, tmp_path: Path, path: str, told: str) -> None:
    server.breaks = lambda scope: scope.get("path") == path and server.engine.faults_begin
    content = run(server, tmp_path / "soak.json", code=1)
    assert any(told in text for text in content["failures"])


def test_a_server_without_an_answer_is_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.breaks = lambda scope: scope.get("path") == "/v1/completions"
    assert main(["bench", "soak", "--url", server.url, "--token-ids", "300:500", "--seconds", "1"]) == 1
    assert "the canary was not answered: HTTP 500: oh" in capsys.readouterr().err


@pytest.mark.parametrize("mix", ["1,2", "a,b,c", "0,0,0", "-1,1,1", "inf,1,1"])
def test_shares_must_be_three_numbers(mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "soak", "--url", "http://127.0.0.1:9", "--model", "m", "--mix", mix]) == 2
    assert "--mix takes three numbers" in capsys.readouterr().err


WHOLE = SoakRequest("valid", "whole", "/", b"", choices=2)
STREAM = SoakRequest("valid", "stream", "/", b"", choices=1, stream=True)
INVALID = SoakRequest("invalid", "bad", "/", b"")


def whole(*reasons: str, usage: object = 1) -> bytes:
    choices = [{"index": index, "finish_reason": reason} for index, reason in enumerate(reasons)]
    return json.dumps({"choices": choices, "usage": usage}).encode()


def stream(*chunks: dict[str, Any], done: bool = True) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + (
        b"data: [DONE]\n\n" if done else b""
    )


END = {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}


@pytest.mark.parametrize(
    ("request_", "status", "body", "told"),
    [
        (WHOLE, 200, whole("stop", "length"), None),
        (WHOLE, 429, b"full", None),
        (WHOLE, 503, b"full", None),
        (WHOLE, 200, whole("stop"), "2 choices were asked for"),
        (WHOLE, 200, whole("stop", "eos"), "finish reasons"),
        (WHOLE, 200, whole("stop", "stop", usage=None), "no usage"),
        (WHOLE, 200, b"{}", "another shape"),
        (WHOLE, 200, b"{", "another shape"),
        (WHOLE, 500, b"oh", "HTTP 500: oh"),
        (WHOLE, 400, b"oh", "HTTP 400: oh"),
        (STREAM, 200, stream(END), None),
        (STREAM, 200, stream(END, done=False), "without [DONE]"),
        (STREAM, 200, stream({"error": {"message": "x"}}), "an error in the stream"),
        (STREAM, 200, stream({"choices": []}), "1 choices were asked for"),
        (STREAM, 200, stream(END, END), "1 choices were asked for"),
        (INVALID, 400, b'{"error": {"message": "no"}}', None),
        (INVALID, 404, b'{"error": {"message": "no"}}', None),
        (INVALID, 400, b'{"detail": "no"}', "another shape"),
        (INVALID, 400, b'{"error": {"message": ""}}', "no message"),
        (INVALID, 200, b"{}", "HTTP 200 for an invalid request"),
        (INVALID, 500, b"oh", "HTTP 500 for an invalid request"),
    ],
)
def test_verdicts(request_: SoakRequest, status: int, body: bytes, told: str | None) -> None:
    wrong = complaint(request_, Exchange(0.0, 1.0, status, [(0.5, body)]))
    assert (wrong is None) == (told is None)
    assert told is None or told in str(wrong)


def test_a_broken_connection_is_no_answer() -> None:
    assert "connection: reset" in str(complaint(WHOLE, Exchange(0.0, 1.0, 200, [], "reset")))


def test_a_seed_gives_the_same_requests() -> None:
    def some(seed: int) -> list[SoakRequest]:
        mix = RequestMix("m", IDS, weights=(1, 1, 1), max_input=20, max_output=9, max_model_len=None, seed=seed)
        mix.features.add("chat")
        return [mix.next() for _ in range(60)]

    assert some(1) == some(1) != some(2)
    assert {item.kind for item in some(1)} == {"valid", "invalid", "dropped"}
