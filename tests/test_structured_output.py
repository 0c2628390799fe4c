"""Structured output through a real server with a tiny random model: chat and completions, streamed and whole, right and wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pegainfer_core.testing.served import served
from pegainfer_qwen3.testing import write_tiny_qwen3

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON_SCHEMA}, "json"),
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json"),
    ({"structured_outputs": {"regex": "[0-9]{2}-[a-f]{1,3}"}}, "[0-9]{2}-[a-f]{1,3}"),
    ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    ({"guided_choice": ["red", "green"]}, "red|green"),
    ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{2}/ ">"'}}, "<[a-z]{2}>"),
    ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_tiny_qwen3(tmp_path_factory.mktemp("model"))
    with served(path) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    usual = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 1, "seed": 3}
    return http.post("/v1/completions", json=usual | fields)


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    usual = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "temperature": 1, "seed": 3}
    return http.post("/v1/chat/completions", json=usual | fields)


def check(text: str, wanted: str) -> None:
    """`wanted` is an expression, or says that the text is JSON of SCHEMA."""
    if wanted == "json":
        value = json.loads(text)
        assert set(value) == {"ok", "kind"} and type(value["ok"]) is bool and value["kind"] in ("a", "bc")
    else:
        assert re.fullmatch(wanted, text)


@pytest.mark.parametrize(("fields", "wanted"), CASES)
def test_a45_the_text_is_what_was_asked_for_in_both_routes_whole_and_streamed(
    http: httpx.Client, fields: dict[str, Any], wanted: str
) -> None:
    for choice in complete(http, n=2, **fields).raise_for_status().json()["choices"]:
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        check(choice["text"], wanted)
    whole = chat(http, **fields).raise_for_status().json()
    check(whole["choices"][0]["message"]["content"], wanted)
    events = chat(http, stream=True, **fields).raise_for_status().text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a46_any_json_object_is_one_or_is_cut_off(http: httpx.Client) -> None:
    body = {"response_format": {"type": "json_object"}, "n": 8, "temperature": 1.0, "max_tokens": 200}
    choices = chat(http, **body).raise_for_status().json()["choices"]
    for choice in choices:
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
        outside_of_strings = re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)
        assert all(len(run) <= 41 for run in re.findall(r"\s+", outside_of_strings))
    assert any(choice["finish_reason"] == "stop" for choice in choices)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_regex": "(["}, "guided_regex", "unclosed character class"),
        ({"structured_outputs": {"grammar": "start: ((("}}, "structured_outputs.grammar", "Expected"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json", "objekt"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema",
            "unsupported keywords: not",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a49_what_cannot_be_compiled_is_a_400_naming_it(
    http: httpx.Client, fields: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    for response in (complete(http, **fields, stream=stream), chat(http, **fields, stream=stream)):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "invalid_grammar" and error["param"] == param
        assert error["message"].startswith(f"{param}: ") and said in error["message"]


def test_without_strict_an_unsupported_keyword_is_left_out_of_account(http: httpx.Client) -> None:
    schema = SCHEMA | {"not": {"required": ["other"]}}
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    check(chat(http, response_format=body).raise_for_status().json()["choices"][0]["message"]["content"], "json")


def test_two_formats_are_one_too_many(http: httpx.Client) -> None:
    response = complete(http, guided_regex="a", response_format={"type": "json_object"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "guided_regex"


def test_a47_min_tokens_stop_ids_and_ignore_eos_do_not_break_the_text(http: httpx.Client) -> None:
    ends: dict[str, Any] = {"logit_bias": {"0": 100, "1": 100, "2": 100}, "stop_token_ids": [0], "temperature": 0}
    for fields in (ends, ends | {"min_tokens": 50}, ends | {"ignore_eos": True}):
        (choice,) = complete(http, response_format=JSON_SCHEMA, **fields).raise_for_status().json()["choices"]
        check(choice["text"], "json")
        assert choice["finish_reason"] == "stop"


def test_free_requests_beside_constrained_ones_are_as_alone(http: httpx.Client) -> None:
    free = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "prompt": [9, 10, 11]}
    alone = complete(http, **free).raise_for_status().json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        bound = [pool.submit(complete, http, seed=seed, response_format=JSON_SCHEMA) for seed in range(4)]
        beside = [pool.submit(complete, http, **free) for _ in range(4)]
        for answer in bound:
            check(answer.result().raise_for_status().json()["choices"][0]["text"], "json")
        for answer in beside:
            assert answer.result().raise_for_status().json()["choices"][0]["text"] == alone


def test_d10_logprobs_beside_a_format_are_finite(http: httpx.Client) -> None:
    body = complete(http, guided_choice=["yes", "no"], logprobs=5, top_k=1).raise_for_status().json()
    logprobs = body["choices"][0]["logprobs"]
    assert all(value is not None and value > -1e4 for value in logprobs["token_logprobs"])
    assert all(value > -1e4 for top in logprobs["top_logprobs"] for value in top.values())
