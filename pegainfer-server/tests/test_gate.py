"""What stands before every route: keys, CORS, rate limits, and what the log may hold (F4, F5, F6)."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import typer
from pegainfer_core.logs import JsonFormatter, TextFormatter, request_id
from pegainfer_server import body, chat_prompt
from pegainfer_server.commands.serve import check_origins, collect_api_keys
from pegainfer_server.probes import PROBE_PATHS
from pegainfer_server.rate_limit import MOST_CALLERS, RateLimit
from pegainfer_server.web_ui import is_ui

Serve = Callable[..., Awaitable[Any]]
ORIGIN = "https://app.example"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-any"}
COMPLETION = {"prompt": "Hello", "max_tokens": 1}


def all_paths(routes: Sequence[Any]) -> Iterator[str]:
    """The paths of routes and of the routers among them."""
    for route in routes:
        if hasattr(route, "path"):
            yield route.path
        else:
            yield from all_paths(route.original_router.routes)


async def test_f4_no_route_but_the_probes_answers_without_a_key(serve: Serve) -> None:
    """Every route that exists, whatever its methods; a new one is covered the day it is added."""
    served = await serve(api_keys=("key",))
    paths = {re.sub("{.*}", "tiny", path) for path in all_paths(served.app.routes)}
    assert {"/docs", "/openapi.json", "/v1/models/tiny", "/metrics", "/livez", "/tokenize"} < paths
    for path in paths:
        for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH"):
            status = (await served.http.request(method, path)).status_code
            free = path in PROBE_PATHS or is_ui({"path": path, "headers": []})
            assert (status == 401) is not free, (method, path, status)
    for path in ("//health", "/health/", "/health/../metrics", "/HEALTH", "/livez/x"):
        assert (await served.http.get(path)).status_code == 401, path


async def test_f4_a_key_may_come_as_anthropics_clients_send_it(serve: Serve) -> None:
    served = await serve(api_keys=("first", "second"))
    for headers in ({"x-api-key": "second"}, {"x-api-key": "first", "Authorization": "Bearer wrong"}):
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
    for headers in ({"x-api-key": ""}, {"x-api-key": "firs"}, {"x-api-key": "Bearer first"}):
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 401


def test_the_environment_holds_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_API_KEY", "one, two")
    assert collect_api_keys(["zero"], None) == ("zero", "one", "two")
    monkeypatch.setenv("PEGAINFER_API_KEY", "one,")
    with pytest.raises(typer.BadParameter, match="not empty"):
        collect_api_keys([], None)


# CORS


async def test_f4_preflight_needs_no_key_and_refusals_can_be_read(serve: Serve) -> None:
    served = await serve(api_keys=("key",), allowed_origins=(ORIGIN,))
    response = await served.http.options("/v1/completions", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    refused = await served.http.post("/v1/completions", json=COMPLETION, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    other = await served.http.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_cors_is_off_unless_asked_for(served: Any) -> None:
    response = await served.http.options("/v1/completions", headers=PREFLIGHT)
    assert response.status_code == 405
    answer = await served.http.post("/v1/completions", json=COMPLETION, headers={"Origin": ORIGIN})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_every_origin(serve: Serve) -> None:
    served = await serve(allowed_origins=("*",))
    answer = await served.http.post("/v1/completions", json=COMPLETION, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == "*"


def test_what_is_an_origin() -> None:
    given = ["*", "https://app.example", "http://localhost:5173", "chrome-extension://abc"]
    assert check_origins(given) == tuple(given)
    for wrong in ("app.example", "https://app.example/", "https://a b", "", "**"):
        with pytest.raises(typer.BadParameter, match="an origin is a scheme and a host"):
            check_origins([wrong])


# rate limits


def test_a_bucket_holds_a_minute_and_refills_evenly() -> None:
    now = 0.0
    limit = RateLimit(6, clock=lambda: now)
    assert [limit.seconds_to_wait("a") for _ in range(7)] == [0.0] * 6 + [pytest.approx(10.0)]
    assert limit.seconds_to_wait("b") == 0.0
    now = 9.0
    assert limit.seconds_to_wait("a") == pytest.approx(1.0)
    now = 10.5
    assert limit.seconds_to_wait("a") == 0.0
    assert limit.seconds_to_wait("a") == pytest.approx(9.5)
    now = 10_000.0
    assert [limit.seconds_to_wait("a") == 0.0 for _ in range(7)] == [True] * 6 + [False]


def test_callers_that_come_and_go_are_forgotten() -> None:
    limit = RateLimit(1, clock=lambda: 0.0)
    for number in range(MOST_CALLERS + 5):
        assert limit.seconds_to_wait(str(number)) == 0.0
    assert limit.seconds_to_wait(str(MOST_CALLERS)) > 0
    assert limit.seconds_to_wait("0") == 0.0


async def test_f6_a_caller_above_the_rate_gets_429_and_others_do_not(serve: Serve) -> None:
    served = await serve(api_keys=("first", "second"), requests_per_minute=2)
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
    for _ in range(2):
        assert (await served.http.post("/v1/completions", json=COMPLETION, headers=first)).status_code == 200
    refused = await served.http.post("/v1/completions", json=COMPLETION, headers=first)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert (await served.http.post("/v1/completions", json=COMPLETION, headers=second)).status_code == 200
    for path in ("/v1/models", "/metrics", "/health"):
        assert (await served.http.get(path, headers=first)).status_code == 200
    unknown = await served.http.post("/v1/completions", json=COMPLETION, headers={"Authorization": "Bearer x"})
    assert unknown.status_code == 401


# templates of requests


async def test_f8_templates_of_requests_are_refused_unless_the_operator_trusts_them(serve: Serve) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hello"}]
    closed = await serve()
    for path in ("/v1/chat/completions", "/tokenize"):
        error = await closed.refused(path, {"messages": messages, "chat_template": template})
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
        await closed.refused(path, {"messages": messages, "chat_template_kwargs": {"chat_template": template}})
    trusting = await serve(trust_request_chat_template=True)
    given = {"messages": messages, "chat_template": template}
    ids = (await trusting.post("/tokenize", given))["tokens"]
    assert ids == trusting.tokenizer.encode("Hello")
    await trusting.post("/v1/chat/completions", {**given, "max_tokens": 1})
    assert list(trusting.engine.requests[-1].prompt_ids) == ids
    error = await trusting.refused("/tokenize", {"messages": messages, "chat_template": "{{ 'a' * 10**10 }}"})
    assert error["param"] == "chat_template"
    await trusting.refused("/tokenize", {"messages": messages, "chat_template": "x" * 65_537})


# nesting


@pytest.mark.parametrize("opening", ["[", '{"a":'])
async def test_f6_bodies_that_are_nested_too_deep_are_refused(served: Any, opening: str) -> None:
    for depth in (127, 128, 5000, 100_000):
        value = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
        response = await served.http.post("/v1/completions", content=f'{{"prompt": {value}}}')
        assert response.status_code == 400
        assert ("nested too deep" in response.json()["error"]["message"]) is (depth > 127), depth


def noting(inner: Callable[..., Any], threads: set[int]) -> Callable[..., Any]:
    """`inner`, which also tells the thread that called it."""

    def call(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return inner(*args)

    return call


async def test_large_bodies_leave_the_event_loop_free(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in a thread, and so are their messages."""
    threads: set[int] = set()
    for name, module in (("parse_body", body), ("read_messages", chat_prompt)):
        monkeypatch.setattr(module, name, noting(getattr(module, name), threads))
    messages = [{"role": "user", "content": "a"}] * 20_000
    await served.refused("/v1/chat/completions", {"messages": messages})
    assert threads and threading.get_ident() not in threads


# logs


async def test_f5_prompts_are_logged_only_if_asked_for(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    diary = {"prompt": "my secret diary", "max_tokens": 1}
    wrong = [{"prompt": "my secret diary" * 500}, {"prompt": ["my secret diary", 3]}, {**diary, "stop": "my secret"}]
    served = await serve()
    await served.post("/v1/completions", diary)
    await served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "my secret diary"}]})
    for item in wrong:
        await served.http.post("/v1/completions", json=item)
    served.engine.rejection = ("invalid_request", "no")
    await served.http.post("/v1/completions", json=diary)
    assert "prompt tokens" in caplog.text and "400" in caplog.text
    assert "secret" not in caplog.text
    asked = await serve(log_prompts=True)
    await asked.post("/v1/completions", diary)
    assert "my secret diary" in caplog.text


async def test_f5_errors_never_repeat_a_key(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served = await serve(api_keys=("key-1234",), log_prompts=True)
    for key in ("key-1234", "key-1234x"):
        response = await served.http.post(
            "/v1/completions", json=COMPLETION, headers={"Authorization": f"Bearer {key}", "x-api-key": key}
        )
        assert "key-1234" not in response.text
    assert "key-1234" not in caplog.text + repr(served.state.liveness)


async def test_records_of_a_request_carry_its_id(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter().format(record))

    handler = Keep()
    logging.getLogger("pegainfer_server").addHandler(handler)
    caplog.set_level(logging.INFO)
    try:
        for fields in ({}, {"n": 2}, {"stream": True}):
            await served.http.post(
                "/v1/completions", json={**COMPLETION, **fields}, headers={"X-Request-Id": "outer-7"}
            )
    finally:
        logging.getLogger("pegainfer_server").removeHandler(handler)
    records = [json.loads(line) for line in lines]
    assert len([record for record in records if "output tokens" in record["message"]]) == 4
    assert {record["request_id"] for record in records} == {"outer-7"}
    assert request_id.get() is None


def test_both_log_formats_are_one_line_a_record() -> None:
    try:
        raise ValueError("what\nnow")
    except ValueError as error:
        record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "said %r", ("x\ny",), (type(error), error, None))
    data = json.loads(JsonFormatter().format(record))
    assert {key: data[key] for key in ("level", "logger", "message")} == {
        "level": "error",
        "logger": "a.b",
        "message": "said 'x\\ny'",
    }
    assert data["time"].endswith("+00:00") and "ValueError: what\nnow" in data["exception"]
    assert "\n" not in JsonFormatter().format(record)
    token = request_id.set("r-1")
    try:
        assert "ERROR a.b: said 'x\\ny' [r-1]" in TextFormatter().format(record)
        assert json.loads(JsonFormatter().format(record))["request_id"] == "r-1"
    finally:
        request_id.reset(token)
