"""Streams: their events, and what happens when a client leaves or the engine fails midway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

Serve = Callable[..., Awaitable[Any]]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 64},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
}


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` holds; a test that hangs here is ended by the test run's own limit."""
    while not condition():
        await asyncio.sleep(0)


class Connection:
    """One request at the ASGI level, whose client reads event by event and can leave."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def text(self) -> str:
        """What has arrived of the body."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def leave(self) -> None:
        """Close the connection and wait until the application has noticed."""
        self._left.set()
        await self.task


async def test_completion_stream(served: Any) -> None:
    """A10."""
    served.answers("one two three")
    events = await served.events(COMPLETIONS, BODIES[COMPLETIONS])
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "one two three"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(set(choice) == set(choices[0]) for choice in choices)
    assert len({event["id"] for event in events}) == 1 and len(events) > 2


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7, 100])
@pytest.mark.parametrize(
    "extra", [{}, {"stop": ["e t"]}, {"logprobs": 1}, {"echo": True}, {"echo": True, "logprobs": 1}]
)
async def test_stream_equals_whole(serve: Serve, tokens_per_step: int, extra: dict[str, Any]) -> None:
    """A17, B8."""
    served = await serve(tokens_per_step=tokens_per_step)
    served.answers("one two \U0001f389 three \u4f60\u597d four")
    body = {**BODIES[COMPLETIONS], **extra}
    whole = (await served.post(COMPLETIONS, body))["choices"][0]
    chunks = [event["choices"][0] for event in await served.events(COMPLETIONS, body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert "\ufffd" not in whole["text"]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    if "logprobs" in extra:
        for column, values in whole["logprobs"].items():
            assert [value for chunk in chunks for value in chunk["logprobs"][column]] == values


async def test_cut_in_the_middle_of_a_character(served: Any) -> None:
    """B1."""
    served.answers("ab\U0001f389")
    ids = served.tokenizer.encode("ab")
    body = {**BODIES[COMPLETIONS], "max_tokens": len(ids) + 2}
    whole = (await served.post(COMPLETIONS, body))["choices"][0]["text"]
    events = await served.events(COMPLETIONS, body)
    assert whole == "ab\ufffd" == "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_at_the_end(served: Any, path: str) -> None:
    """A14."""
    served.answers("one two")
    *events, last = await served.events(path, {**BODIES[path], "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(served.tokenizer.encode("one two")) + 1
    cached = 16 if last["usage"]["prompt_tokens"] > 16 else 0
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_all_along(served: Any, path: str) -> None:
    """A14."""
    served.answers("one two")
    events = await served.events(path, {**BODIES[path], "stream_options": {"continuous_usage_stats": True}})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == len(served.tokenizer.encode("one two")) + 1
    assert all(event["choices"] for event in events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_token_ids_in_a_stream(served: Any, path: str) -> None:
    served.engine.script = lambda _: [300, 301, 302]
    events = await served.events(path, {**BODIES[path], "return_token_ids": True})
    choices = [event["choices"][0] for event in events]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == [300, 301, 302]
    assert choices[0]["prompt_token_ids"] == served.engine.requests[0].prompt_ids


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves(serve: Serve, path: str, n: int, begun: bool, stream: bool) -> None:
    """A54."""
    served = await serve(auto=False)
    served.engine.script = lambda _: [300] * 50
    connection = Connection(served.app, path, {**BODIES[path], "n": n, "stream": stream})
    await until(lambda: len(served.engine.open_ids) == n)
    if begun:
        served.engine.step()
        if stream:
            await until(lambda: len(connection.sent) > n)
    await connection.leave()
    assert sorted(served.engine.aborted) == sorted(request.request_id for request in served.engine.requests)
    assert served.engine.open_ids == [] and served.engine.num_open == 0


async def test_many_clients_that_leave(serve: Serve) -> None:
    """A54."""
    served = await serve(auto=False)
    served.engine.script = lambda _: [300] * 50
    connections = [
        Connection(served.app, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": index % 2 == 0}) for index in range(100)
    ]
    await until(lambda: len(served.engine.open_ids) == 100)
    served.engine.step()
    await asyncio.gather(*(connection.leave() for connection in connections[:50]))
    assert len(served.engine.open_ids) == 50
    while served.engine.open_ids:
        served.engine.step()
    await asyncio.gather(*(connection.task for connection in connections[50:]))
    for connection in connections[50:]:
        assert '"finish_reason":"stop"' in connection.text
    assert served.engine.num_open == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_engine_fails_midway(serve: Serve, n: int) -> None:
    served = await serve(auto=False)
    served.engine.script = lambda _: [300] * 50
    connection = Connection(served.app, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True, "n": n})
    await until(lambda: len(served.engine.open_ids) == n)
    served.engine.step()
    await until(lambda: len(connection.sent) > n)
    served.engine.fail(served.engine.open_ids[0], "logits are not finite")
    await connection.task
    *_, error, done, end = connection.text.split("\n\n")
    assert "logits are not finite" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert (done, end) == ("data: [DONE]", "")
    assert served.engine.open_ids == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_engine_dies(serve: Serve, stream: bool, begun: bool) -> None:
    served = await serve(auto=False)
    served.engine.script = lambda _: [300] * 50
    connection = Connection(served.app, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": stream})
    await until(lambda: bool(served.engine.open_ids))
    if begun:
        served.engine.step()
        if stream:
            await until(lambda: len(connection.sent) > 1)
    served.engine.died("killed by signal 9")
    await connection.task
    assert connection.sent[0]["status"] == (200 if stream and begun else 503)
    assert "killed by signal 9" in connection.text and "engine_dead" in connection.text
    error = await served.refused(COMPLETIONS, BODIES[COMPLETIONS], 503)
    assert error["code"] == "engine_dead" and error["type"] == "server_error"


async def test_engine_closes_with_requests_open(serve: Serve) -> None:
    served = await serve(auto=False)
    connection = Connection(served.app, COMPLETIONS, BODIES[COMPLETIONS])
    await until(lambda: bool(served.engine.open_ids))
    await served.engine.close()
    await connection.task
    assert connection.sent[0]["status"] == 503 and "aborted" in connection.text


async def test_application_that_is_cancelled_aborts(serve: Serve) -> None:
    served = await serve(auto=False)
    connection = Connection(served.app, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True})
    await until(lambda: bool(served.engine.open_ids))
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert served.engine.open_ids == []


async def test_headers_do_not_wait_for_a_slow_first_token(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegainfer_server.sse.HEADERS_AFTER", 0)
    served = await serve(auto=False)
    connection = Connection(served.app, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True})
    await until(lambda: bool(served.engine.open_ids) and bool(connection.sent))
    assert connection.sent[0]["status"] == 200 and connection.text == ""
    served.engine.rejection = ("queue_full", "too many")
    served.engine.step()
    await connection.task
    error, done, _ = connection.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "queue_full"
    assert done == "data: [DONE]"


async def test_client_that_leaves_after_early_headers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegainfer_server.sse.HEADERS_AFTER", 0)
    served = await serve(auto=False)
    connection = Connection(served.app, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True, "n": 2})
    await until(lambda: len(served.engine.open_ids) == 2 and bool(connection.sent))
    await connection.leave()
    assert served.engine.open_ids == [] and served.engine.num_open == 0
