"""POST /v1/responses: items to the template, answers to items, and streams that say the same piece by piece."""

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
PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


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


def without_ids(value: Any) -> Any:
    """Without what differs between two runs of the same request."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "item_id", "created_at")}
    return value


async def events(served: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each comes under its own name and in order."""
    response = await served.http.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_shape_of_a_response(served: Any) -> None:
    served.answers("Paris.")
    data = await served.post(PATH, {"model": "alias", "input": "Hello", "metadata": {"a": "b"}, "temperature": 0.5})
    assert data["id"].startswith("resp_") and data["object"] == "response" and data["model"] == "alias"
    assert (data["status"], data["error"], data["incomplete_details"]) == ("completed", None, None)
    assert (data["metadata"], data["temperature"], data["store"]) == ({"a": "b"}, 0.5, False)
    (item,) = data["output"]
    part = {"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}
    assert without_ids(item) == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    generated = len(served.tokenizer.encode("Paris.")) + 1
    assert data["usage"]["output_tokens"] == generated
    assert data["usage"]["input_tokens"] == len(served.engine.requests[0].prompt_ids)
    assert data["usage"]["total_tokens"] == generated + data["usage"]["input_tokens"]


async def test_thinking_text_and_calls_are_items_of_their_own(thinker: Any) -> None:
    thinker.answers(ANSWER)
    data = await thinker.post(PATH, {"input": "x", "tools": [TOOL], "include": ["reasoning.encrypted_content"]})
    thought, message, call = data["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}] and thought["summary"] == []
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1, "b": "x"})
    assert call["call_id"] and data["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [item["status"] for item in data["output"]] == ["completed"] * 3
    assert data["tools"] == [TOOL] and '"description": "Adds."' in prompt(thinker)


@pytest.mark.parametrize("tokens_per_step", [1, 7, 500])
async def test_a_stream_says_what_the_whole_does(serve: Serve, thinker: Any, tokens_per_step: int) -> None:
    thinker.engine.tokens_per_step = tokens_per_step
    thinker.answers(ANSWER)
    body = {"input": "x", "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    whole = await thinker.post(PATH, body)
    told = await events(thinker, body)
    assert [event["type"] for event in (*told[:2], told[-1])] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    last = told[-1]["response"]
    assert without_ids(last["usage"]) == without_ids(whole["usage"])
    output = [{**item, "call_id": ""} if "call_id" in item else item for item in last["output"]]
    expected = [{**item, "call_id": ""} if "call_id" in item else item for item in whole["output"]]
    assert without_ids(output) == without_ids(expected)
    for index, item in enumerate(last["output"]):
        own = [event for event in told if event.get("output_index") == index]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["status"] == "in_progress"
        assert own[-1]["type"] == "response.output_item.done" and own[-1]["item"] == item
        joined = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert joined == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    places = [event["output_index"] for event in told if "output_index" in event]
    assert places == sorted(places)


async def test_a_cut_answer_is_incomplete(served: Any) -> None:
    served.answers("one two three four five")
    whole = await served.post(PATH, {"input": "x", "max_output_tokens": 2})
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete" and whole["usage"]["output_tokens"] == 2
    assert (await events(served, {"input": "x", "max_output_tokens": 2}))[-1]["type"] == "response.incomplete"


async def test_items_become_messages(thinker: Any) -> None:
    question = [{"type": "input_text", "text": "1 + "}, {"type": "input_text", "text": "x?"}]
    thought = [{"type": "reasoning_text", "text": "Hm."}]
    said = [{"type": "output_text", "text": "Wait.", "annotations": []}]
    call = {"type": "function_call", "name": "add", "status": "completed"}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": question},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": thought},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": said},
        {**call, "id": "fc", "call_id": "c1", "arguments": '{"a": 1}'},
        {**call, "call_id": "c2", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
    ]
    await thinker.post(PATH, {"input": items, "instructions": "Add."})
    assert prompt(thinker) == (
        "<|im_start|>system\nAdd.\n\nBe brief.<|im_end|>\n<|im_start|>user\n1 + x?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nWait."
        "\n<tool_call>c1 add a=1</tool_call>\n<tool_call>c2 add</tool_call><|im_end|>\n"
        "<|im_start|>tool\n2 for c1<|im_end|>\n<|im_start|>tool\n0 for c2<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("keep", ["content", "encrypted_content"])
async def test_an_answer_can_be_sent_back(thinker: Any, keep: str) -> None:
    """A44: also by clients that keep nothing of the thinking but its hidden form."""
    thinker.answers(ANSWER)
    first = await thinker.post(PATH, {"input": "x", "tools": [TOOL], "include": ["reasoning.encrypted_content"]})
    dropped = {"content", "encrypted_content"} - {keep}
    history: list[Any] = []
    for item in first["output"]:
        thought = item["type"] == "reasoning"
        history.append({key: value for key, value in item.items() if not thought or key not in dropped})
    call_id = first["output"][-1]["call_id"]
    history.append({"type": "function_call_output", "call_id": call_id, "output": "2"})
    await thinker.post(PATH, {"input": [{"role": "user", "content": "x"}, *history], "tools": [TOOL]})
    turn = prompt(thinker).split("<|im_start|>assistant\n")[1]
    assert turn.startswith("<think>\nHm.\n</think>\n\nLet me see.") and f"<tool_call>{call_id} add" in turn


async def test_fields_reach_the_engine(thinker: Any) -> None:
    sampling = {"top_p": 0.5, "top_k": 3, "seed": 7, "presence_penalty": 1.0, "min_tokens": 1, "ignore_eos": True}
    await thinker.post(
        PATH,
        {**sampling, "input": "x", "max_output_tokens": 9, "cache_salt": "s", "service_tier": "flex", "stop": "zz"},
    )
    (request,) = thinker.engine.requests
    assert {name: getattr(request.params, name) for name in sampling} == sampling
    assert (request.params.max_tokens, request.cache_salt, request.priority) == (9, "s", 1)


async def test_formats_and_forced_calls_become_grammars(thinker: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    await thinker.post(PATH, {"input": "x", "text": {"format": shape}})
    await thinker.post(PATH, {"input": "x", "text": {"format": {"type": "json_object"}}})
    await thinker.post(PATH, {"input": "x", "tools": [TOOL], "tool_choice": "required"})
    await thinker.post(PATH, {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}})
    await thinker.post(PATH, {"input": "x", "tools": [TOOL], "tool_choice": "none"})
    grammars = [request.params.grammar for request in thinker.engine.requests]
    assert json.loads(grammars[0].text) == schema
    kinds = [None if grammar is None else grammar.kind for grammar in grammars]
    assert kinds == ["json_schema", "json_object", "lark", "lark", None]


@pytest.mark.parametrize(
    ("effort", "ending"), [("none", "<think>\n\n</think>\n\n"), ("low", "<think>\n"), (None, "assistant\n")]
)
async def test_effort_turns_thinking_on_and_off(thinker: Any, effort: str | None, ending: str) -> None:
    """A41."""
    thinker.answers("Paris.")
    data = await thinker.post(PATH, {"input": "x", "reasoning": {"effort": effort}})
    assert prompt(thinker).endswith(ending)
    kinds = [item["type"] for item in data["output"]]
    assert kinds == (["reasoning"] if effort == "low" else ["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "input[0].foo"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "!"}]}, "input[0].encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "foo": 1}]}, "tools[0].foo"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"temperature": -1}, "temperature"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_what_is_not_supported_is_named(served: Any, fields: dict[str, Any], param: str) -> None:
    error = await served.refused(PATH, {"input": "x", **fields})
    assert error["param"] == param and param in error["message"]
    assert served.engine.received == []


async def test_a_failure_midway_is_the_last_event(serve: Serve) -> None:
    served = await serve(auto=False)
    task = asyncio.create_task(events(served, {"input": "Hello"}))
    while not served.engine.open_ids:
        await asyncio.sleep(0)
    served.engine.step()
    served.engine.fail(served.engine.open_ids[0], "broken")
    last = (await task)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "engine_error" and "broken" in last["response"]["error"]["message"]


async def test_a_refusal_before_the_first_event_has_its_own_status(served: Any) -> None:
    served.engine.rejection = ("queue_full", "too many")
    for stream in (False, True):
        error = await served.refused(PATH, {"input": "x", "stream": stream}, 429)
        assert error["code"] == "queue_full"
    assert (await served.refused(PATH, {"input": "x", "model": "nope"}, 404))["code"] == "model_not_found"
