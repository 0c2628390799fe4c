"""Tool calls and thinking against a real server with a random model: what a grammar enforces, whatever the model would rather say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pegainfer_core.testing.served import served
from pegainfer_core.testing.tiny_chat import write_tiny_chat
from pegainfer_qwen3.testing import write_tiny_qwen3

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "now": NOW}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
EOS, END_OF_THINKING = "2", "509"  # ids of the tiny tokenizer


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = write_tiny_chat(write_tiny_qwen3(tmp_path_factory.mktemp("model")))
    with served(path) as server:
        yield server.url


def chat(url: str, **fields: Any) -> Any:
    usual = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "temperature": 1.0, "seed": 5}
    response = httpx.post(f"{url}/v1/chat/completions", json=usual | fields, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check(call: Any) -> str:
    name: str = call["function"]["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    return name


@pytest.mark.parametrize("thinking", [None, True, False])
def test_calls_that_must_be_made_are_made(url: str, thinking: bool | None) -> None:
    """A11, A45: required and named, alone and after thinking that has a budget."""
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    fields = {"tools": TOOLS, "chat_template_kwargs": kwargs, "thinking_budget": 5, "logit_bias": {EOS: 5}}
    required = chat(url, **fields, tool_choice="required")
    assert required["finish_reason"] == "tool_calls" and not required["message"]["content"]
    assert {check(call) for call in required["message"]["tool_calls"]} <= set(SCHEMAS)
    assert ("reasoning_content" in required["message"]) == (thinking is True)
    named = {"type": "function", "function": {"name": "get_weather"}}
    one = chat(url, **fields, tool_choice=named)
    assert one["finish_reason"] == "stop"
    assert [check(call) for call in one["message"]["tool_calls"]] == ["get_weather"]
    single = chat(url, **fields, tool_choice="required", parallel_tool_calls=False)
    assert len(single["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_format_binds_the_answer_and_not_the_thinking(url: str, thinking: bool, stream: bool) -> None:
    """A45."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: Any = {
        "model": "test",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": FORMAT,
        "max_tokens": 200,
        "seed": 1,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}, "thinking_budget": 9},
    }
    if stream:
        parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        content = "".join(part.content or "" for part in parts)
        reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    else:
        message = client.chat.completions.create(**asked).choices[0].message
        content, reasoning = message.content or "", getattr(message, "reasoning_content", "")
    jsonschema.validate(json.loads(content), ANSWER)
    assert bool(reasoning) == thinking


def test_thinking_ends_at_its_budget(url: str) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {END_OF_THINKING: -100}}
    cut = chat(url, **fields, max_tokens=60)
    assert cut["finish_reason"] == "length" and cut["message"]["content"] is None
    for budget in (0, 7):
        choice = chat(url, **fields, thinking_budget=budget, max_tokens=60, ignore_eos=True, return_token_ids=True)
        assert choice["token_ids"].index(int(END_OF_THINKING)) == budget
        assert choice["message"]["content"]


def test_a_format_beside_tools_leaves_the_choice(url: str) -> None:
    """Calls that fit their schemas, or text that fits the format: nothing else."""
    for seed in range(6):
        message = chat(
            url, tools=TOOLS, response_format=FORMAT, seed=seed, chat_template_kwargs={"enable_thinking": False}
        )["message"]
        for call in message.get("tool_calls", []):
            check(call)
        if not message.get("tool_calls"):
            jsonschema.validate(json.loads(message["content"]), ANSWER)


def test_the_sdk_puts_streamed_calls_together(url: str) -> None:
    """A34, A36 with the OpenAI SDK's own streaming helper."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: Any = {
        "model": "test",
        "messages": [{"role": "user", "content": "x"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 400,
        "seed": 3,
        "logit_bias": {EOS: 5},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    calls = [
        [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
        for choice in (whole, streamed)
    ]
    assert calls[0] == calls[1] and calls[0]
