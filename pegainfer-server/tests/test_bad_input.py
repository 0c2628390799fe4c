"""Every kind of bad input: the right status, an OpenAI error object naming the offender, and nothing reaches the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

Serve = Callable[..., Awaitable[Any]]
PATH = "/v1/completions"

FIELDS: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", ["a", ""]),
    ("prompt", [[]]),
    ("prompt", [[1], []]),
    ("prompt", None),
    ("prompt", 7),
    ("prompt", True),
    ("prompt", {"a": 1}),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [1, [2]]),
    ("prompt", [1.0]),
    ("prompt", [True]),
    ("prompt", [[True]]),
    ("prompt", [-1]),
    ("prompt", [512]),
    ("prompt", [10**9]),
    ("prompt", [10**30]),
    ("prompt", [[3], [512]]),
    ("prompt", ["a"] * 2049),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("temperature", 1e308),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 10**30),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 5e-324),
    ("repetition_penalty", 1e308),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 10**6),
    ("n", "2"),
    ("n", True),
    ("best_of", 3),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 1.0),
    ("max_tokens", "5"),
    ("max_tokens", 10**30),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", 2**63),
    ("seed", 1.5),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("logprobs", 10**9),
    ("stop", [""]),
    ("stop", ""),
    ("stop", 7),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1025),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", list(range(100))),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"512": 5}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("logit_bias", [1]),
    ("cache_salt", 7),
    ("priority", "high"),
    ("echo", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("suffix", "x"),
    ("response_format", {"type": "structural_tag"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "no"}}),
    ("response_format", {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}),
    ("response_format", {"type": "text", "schema": {}}),
    ("response_format", "text"),
    ("guided_json", "{"),
    ("guided_json", "[]"),
    ("guided_json", 7),
    ("guided_regex", ""),
    ("guided_regex", "x" * 300_000),
    ("guided_choice", []),
    ("guided_choice", "yes"),
    ("guided_choice", ["a", ""]),
    ("guided_grammar", ""),
    ("guided_whitespace_pattern", " "),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("structured_outputs", {"json_object": False}),
    ("structured_outputs", {"regx": "a"}),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("user", 7),
    ("user", "x" * 513),
    ("safety_identifier", ["a"]),
    ("metadata", "a"),
    ("metadata", {"a": 1}),
    ("metadata", {"a": "x" * 513}),
    ("metadata", {str(i): "" for i in range(17)}),
    ("store", "yes"),
    ("store", True),
    ("prompt_cache_key", True),
    ("service_tier", "fast"),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", "soon"),
    ("timeout", 10**9),
    ("truncate_prompt_tokens", 4),
    ("use_beam_search", True),
    ("no_such_field", 1),
    ("messages", []),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
async def test_field_is_refused_by_name_and_a_request_beside_it_is_unharmed(
    served: Any, field: str, value: Any
) -> None:
    """A22, A25, A26, A27, D6, D15, F6."""
    served.answers("The canary sings.")
    body = {"prompt": "Hello", field: value}
    error = await served.refused(PATH, body)
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0].partition("[")[0] == field
    assert field in error["message"]
    assert len(error["message"]) < 300
    assert served.engine.received == []
    assert (await served.complete())["choices"][0]["text"] == "The canary sings."


async def test_extreme_values_that_are_fine(served: Any) -> None:
    """D6."""
    for values in ({"temperature": 1e-30}, {"temperature": 999999}, {"top_k": 10**9}, {"top_k": -1}, {"top_p": 1e-9}):
        await served.complete(**values)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "chat_template_kwargs": {"x": NaN}}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b"[]",
        b'"text"',
        b"null",
    ],
)
async def test_malformed_json(served: Any, raw: bytes) -> None:
    """A25, D6."""
    for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await served.http.post(path, content=raw)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "invalid_json" and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("length", "status"), [(127, 200), (128, 400), (129, 400)])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_around_the_context_length(served: Any, length: int, status: int, stream: bool) -> None:
    """A22, A52: never cut, refused."""
    response = await served.http.post(PATH, json={"prompt": [300] * length, "max_tokens": 5, "stream": stream})
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"] and str(length) in error["message"]
        assert served.engine.received == []
    else:
        assert served.engine.requests[0].params.max_tokens == 1


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_unknown_model(served: Any, path: str) -> None:
    """A25."""
    bodies: dict[str, dict[str, Any]] = {
        PATH: {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [300]},
    }
    body = bodies[path]
    error = await served.refused(path, {**body, "model": "nope"}, 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert "nope" in error["message"] and "tiny" in error["message"]
    assert (await served.refused(path, {**body, "model": 7}))["param"] == "model"


async def test_unknown_route_and_method(served: Any) -> None:
    for method, path, status in [("GET", "/nope", 404), ("GET", PATH, 405), ("POST", "/health", 405)]:
        response = await served.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()) == {"error"}
        assert response.json()["error"]["message"]


async def test_body_too_large(serve: Serve) -> None:
    served = await serve(max_body_bytes=1000)
    error = await served.refused(PATH, {"prompt": "a" * 1000}, 413)
    assert error["code"] == "body_too_large" and "1000" in error["message"]

    async def pieces() -> Any:
        for _ in range(3):
            yield b'{"prompt": "' + b"a" * 400

    response = await served.http.post(PATH, content=pieces())  # chunked: no length in advance
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("code", "status"),
    [("context_length_exceeded", 400), ("kv_budget_exceeded", 400), ("invalid_request", 400), ("queue_full", 429)],
)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
async def test_rejection_by_the_engine(served: Any, code: str, status: int, extra: dict[str, Any]) -> None:
    served.engine.rejection = (code, "the engine says no")
    response = await served.http.post(PATH, json={"prompt": "a", **extra})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code and error["message"] == "the engine says no"
    assert ("retry-after" in response.headers) == (status == 429)
    assert served.engine.num_open == 0


async def test_failure_in_the_engine(served: Any) -> None:
    served.engine.auto = False
    work = asyncio.create_task(served.http.post(PATH, json={"prompt": "a"}))
    while not served.engine.open_ids:
        await asyncio.sleep(0)
    served.engine.fail(served.engine.open_ids[0], "logits are not finite")
    response = await work
    assert response.status_code == 500
    assert "logits are not finite" in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "server_error"


async def test_the_unforeseen_is_a_bare_500(served: Any) -> None:
    def explode(_: Any) -> Any:
        raise RuntimeError("secret detail")

    served.engine.script = explode
    for stream in (False, True):
        error = await served.refused(PATH, {"prompt": "a", "stream": stream}, 500)
        assert error["type"] == "server_error" and "secret" not in error["message"]


async def test_error_repeats_little_of_a_wrong_value(served: Any) -> None:
    error = await served.refused(PATH, {"prompt": "a", "temperature": "x" * 10_000})
    assert len(json.dumps(error)) < 400


TEXT = "word " * 400  # the longest token has 13 characters, the context 128 tokens: 1664 characters at most


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"prompt": TEXT}, "prompt"),
        (PATH, {"prompt": ["short", TEXT]}, "prompt"),
        (PATH, {"prompt": TEXT, "echo": True, "max_tokens": 0}, "prompt"),
        (PATH, {"prompt": TEXT, "stream": True}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
        ("/tokenize", {"prompt": TEXT}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
    ],
)
async def test_texts_that_cannot_fit_are_refused_before_they_are_tokenized(
    served: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    """A52."""
    encode = served.tokenizer.encode

    def short_only(text: str, **options: Any) -> list[int]:
        assert len(text) < 100
        ids: list[int] = encode(text, **options)
        return ids

    monkeypatch.setattr(served.tokenizer, "encode", short_only)
    error = await served.refused(path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "128 tokens" in error["message"]
    assert served.engine.received == []


@pytest.mark.parametrize("prompt", [[300] * 10**6, [[300], [300] * 129], [300] * 128 + ["x"]])
async def test_the_length_of_token_ids_is_checked_first(served: Any, prompt: Any) -> None:
    error = await served.refused(PATH, {"prompt": prompt})
    assert error["code"] == "context_length_exceeded"


async def test_too_many_prompts_are_refused_before_they_are_read(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "encode", None)
    error = await served.refused(PATH, {"prompt": ["a"] * 21, "n": 100})
    assert error["param"] == "prompt" and "at most 20 prompts" in error["message"]


async def test_a_prompt_that_fills_the_context_can_be_echoed(served: Any) -> None:
    """A22."""
    full = {"prompt": [300] * 128, "echo": True}
    for logprobs in (None, 0):
        answer = await served.post(PATH, {**full, "max_tokens": 0, "logprobs": logprobs})
        assert answer["usage"]["prompt_tokens"] == 128 and answer["usage"]["completion_tokens"] == 0
    assert (await served.refused(PATH, {**full, "max_tokens": 1}))["code"] == "context_length_exceeded"
    over = {"prompt": [300] * 129, "echo": True, "max_tokens": 0}
    assert (await served.refused(PATH, over))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "x"])
async def test_a_body_that_is_said_to_be_no_json_is_refused(served: Any, path: str, kind: str) -> None:
    response = await served.http.post(path, content=b"{}", headers={"Content-Type": kind})
    assert response.status_code == 415
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
    assert "application/json" in error["message"] and kind in error["message"]


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "application/json"}, {"Content-Type": "Application/JSON; charset=utf-8"}]
)
async def test_a_body_that_may_be_json_is_read(served: Any, headers: dict[str, str]) -> None:
    response = await served.http.post(PATH, content=b'{"prompt": "Hello"}', headers=headers)
    assert response.status_code == 200
