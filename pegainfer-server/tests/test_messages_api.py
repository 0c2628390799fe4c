"""POST /v1/messages: Anthropic's blocks to the template, answers to blocks, and streams that say the same piece by piece."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.chat_syntax import qwen_json_syntax
from pegainfer_core.testing.tiny_chat import write_tiny_chat
from pegainfer_core.tokenizer import load_tokenizer

Serve = Callable[..., Awaitable[Any]]
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}


@pytest.fixture
async def thinker(serve: Serve, tmp_path: Path) -> Any:
    """A server whose model thinks and calls tools."""
    write_tiny_chat(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    chat_format = TemplateChatFormat(tokenizer, tmp_path, qwen_json_syntax)
    return await serve(tokenizer=tokenizer, chat_format=chat_format, max_model_len=2048)


def prompt(served: Any, index: int = -1) -> str:
    text: str = served.tokenizer.decode(served.engine.requests[index].prompt_ids)
    return text


async def events(served: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each comes under its own name."""
    response = await served.http.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def refused(served: Any, body: dict[str, Any], status: int = 400, path: str = PATH) -> dict[str, Any]:
    """The error object, in Anthropic's form."""
    data = await served.post(path, body, status)
    assert set(data) == {"type", "error"} and data["type"] == "error"
    error: dict[str, Any] = data["error"]
    return error


async def test_shape_of_a_message(served: Any) -> None:
    served.answers("Paris.")
    data = await served.post(PATH, {**HELLO, "model": "alias", "system": "Name the capital of France."})
    assert data.pop("id").startswith("msg_")
    assert data == {
        "type": "message",
        "role": "assistant",
        "model": "alias",
        "content": [{"type": "text", "text": "Paris."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(served.engine.requests[0].prompt_ids) - 16,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": len(served.tokenizer.encode("Paris.")) + 1,
            "service_tier": "standard",
        },
    }


async def test_thinking_text_and_calls_are_blocks_of_their_own(thinker: Any) -> None:
    thinker.answers(ANSWER)
    data = await thinker.post(PATH, {**HELLO, "tools": [TOOL]})
    thought, text, call = data["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text["text"].strip() == "Let me see."
    assert call.pop("id") and call == {"type": "tool_use", "name": "add", "input": {"a": 1, "b": "x"}}
    assert data["stop_reason"] == "tool_use"
    assert '"description": "Adds."' in prompt(thinker)


@pytest.mark.parametrize("tokens_per_step", [1, 7, 500])
async def test_a_stream_says_what_the_whole_does(thinker: Any, tokens_per_step: int) -> None:
    thinker.engine.tokens_per_step = tokens_per_step
    thinker.answers(ANSWER)
    body = {**HELLO, "tools": [TOOL]}
    whole = await thinker.post(PATH, body)
    told = await events(thinker, body)
    assert told[0]["type"] == "message_start" and told[0]["message"]["content"] == []
    assert told[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"] == whole["usage"] and told[-1] == {"type": "message_stop"}
    for index, block in enumerate(whole["content"]):
        own = [event for event in told if event.get("index") == index]
        assert [event["type"] for event in (own[0], own[-1])] == ["content_block_start", "content_block_stop"]
        assert own[0]["content_block"]["type"] == block["type"]
        joined = "".join(text for event in own[1:-1] for key, text in event["delta"].items() if key != "type")
        assert joined == json.dumps(block["input"]) if "input" in block else joined == block[block["type"]]
    places = [event["index"] for event in told if "index" in event]
    assert places == sorted(places) and places[-1] == len(whole["content"]) - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["two"]}, "stop_sequence", "two"),
        ({}, "end_turn", None),
    ],
)
async def test_stop_reasons(
    served: Any, stream: bool, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    served.answers("one two three four five")
    body = {**HELLO, **fields}
    ending = (await events(served, body))[-2]["delta"] if stream else await served.post(PATH, body)
    assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, sequence)


async def test_a_call_that_is_cut_off_has_no_input(thinker: Any) -> None:
    thinker.answers(CALL)
    cut = len(thinker.tokenizer.encode(CALL)) - 12
    data = await thinker.post(PATH, {**HELLO, "tools": [TOOL], "max_tokens": cut})
    assert data["stop_reason"] == "max_tokens" and data["content"][-1]["input"] == {}


async def test_blocks_become_messages(thinker: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + ", **cached}, {"type": "text", "text": "x?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "0"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    system = [{"type": "text", "text": "Add.", **cached}, {"type": "text", "text": "Be brief."}]
    await thinker.post(PATH, {"messages": messages, "system": system, "max_tokens": 5})
    assert prompt(thinker) == (
        "<|im_start|>system\nAdd.\n\nBe brief.<|im_end|>\n<|im_start|>user\n1 + x?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nWait."
        "\n<tool_call>c1 add a=1</tool_call>\n<tool_call>c2 add</tool_call><|im_end|>\n"
        "<|im_start|>tool\n2 for c1<|im_end|>\n<|im_start|>tool\nError: 0 for c2<|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_last_assistant_message_is_continued(served: Any) -> None:
    """A50, as this API has it."""
    messages = [*HELLO["messages"], {"role": "assistant", "content": "The capital is"}]
    await served.post(PATH, {**HELLO, "messages": messages})
    assert prompt(served).endswith("<|im_start|>assistant\nThe capital is")


async def test_fields_reach_the_engine(thinker: Any) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.5, "top_k": 3}
    await thinker.post(PATH, {**HELLO, **sampling, "metadata": {"user_id": "u"}, "service_tier": "auto"})
    (request,) = thinker.engine.requests
    assert {name: getattr(request.params, name) for name in sampling} == sampling
    assert request.params.max_tokens == 200


async def test_formats_and_forced_calls_become_grammars(thinker: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    shape = {"format": {"type": "json_schema", "schema": schema}}
    await thinker.post(PATH, {**HELLO, "output_config": shape})
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}, {"type": "auto"}, {"type": "none"}):
        await thinker.post(PATH, {**HELLO, "tools": [TOOL], "tool_choice": choice})
    grammars = [request.params.grammar for request in thinker.engine.requests]
    assert json.loads(grammars[0].text) == schema
    kinds = [None if grammar is None else grammar.kind for grammar in grammars]
    assert kinds == ["json_schema", "lark", "lark", None, None]


async def test_one_call_at_most_where_no_more_are_wanted(thinker: Any) -> None:
    thinker.answers(f"{CALL}\n{CALL}")
    for one, calls in ((False, 2), (True, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": one}
        data = await thinker.post(PATH, {**HELLO, "tools": [TOOL], "tool_choice": choice})
        assert [block["type"] for block in data["content"]].count("tool_use") == calls


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "assistant\n"),
        ({"thinking": {"type": "disabled"}}, "<think>\n\n</think>\n\n"),
        ({"thinking": {"type": "adaptive"}}, "<think>\n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "<think>\n"),
        ({"output_config": {"effort": "low"}}, "<think>\n"),
    ],
)
async def test_thinking_is_turned_on_and_off(thinker: Any, fields: dict[str, Any], ending: str) -> None:
    """A41."""
    await thinker.post(PATH, {**HELLO, **fields})
    assert prompt(thinker).endswith(ending)
    thinking = thinker.engine.requests[0].params.thinking
    assert (thinking is not None and thinking.budget == 5) == ("budget_tokens" in fields.get("thinking", {}))


async def test_thinking_can_be_left_out_of_the_answer(thinker: Any) -> None:
    thinker.answers("Hm.\n</think>\n\nParis.")
    body = {**HELLO, "thinking": {"type": "adaptive", "display": "omitted"}}
    assert [block["type"] for block in (await thinker.post(PATH, body))["content"]] == ["text"]


async def test_a_bound_on_thinking_holds_for_a_model_that_does_not_think(served: Any) -> None:
    for kind in ({"type": "enabled", "budget_tokens": 5}, {"type": "adaptive"}, {"type": "disabled"}):
        await served.post(PATH, {**HELLO, "thinking": kind})
    assert [request.params.thinking for request in served.engine.requests] == [None] * 3


async def test_tokens_are_counted_without_the_engine(thinker: Any) -> None:
    body = {"messages": HELLO["messages"], "system": "Be brief.", "tools": [TOOL]}
    counted = await thinker.post(COUNT, body)
    assert thinker.engine.received == []
    await thinker.post(PATH, {**body, "max_tokens": 1})
    assert counted == {"input_tokens": len(thinker.engine.requests[0].prompt_ids)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]},
            "messages[0].content[0].a",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"system": 7}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
async def test_what_is_not_supported_is_named(served: Any, fields: dict[str, Any], param: str) -> None:
    error = await refused(served, {**HELLO, **fields})
    assert (error["type"], error["param"]) == ("invalid_request_error", param) and param in error["message"]
    assert served.engine.received == []


async def test_errors_have_anthropic_s_form(serve: Serve) -> None:
    served = await serve()
    assert (await refused(served, {**HELLO, "model": "nope"}, 404))["type"] == "not_found_error"
    served.engine.rejection = ("queue_full", "too many")
    for stream in (False, True):
        assert (await refused(served, {**HELLO, "stream": stream}, 429))["type"] == "rate_limit_error"
    served.engine.died("gone")
    assert (await refused(served, HELLO, 503))["type"] == "overloaded_error"
    closed = await serve(api_keys=("key",))
    assert (await refused(closed, HELLO, 401))["type"] == "authentication_error"
    response = await closed.http.post(PATH, json=HELLO, headers={"x-api-key": "key"})
    assert response.status_code == 200


async def test_a_failure_midway_is_the_last_event(serve: Serve) -> None:
    served = await serve(auto=False)
    task = asyncio.create_task(events(served, HELLO))
    while not served.engine.open_ids:
        await asyncio.sleep(0)
    served.engine.step()
    served.engine.fail(served.engine.open_ids[0], "broken")
    last = (await task)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "broken" in last["error"]["message"]
