"""POST /v1/chat/completions: what reaches the template and the engine, and the shape of answers."""

from __future__ import annotations

from typing import Any

import pytest
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.testing.fake_client import fake_logprob

PATH = "/v1/chat/completions"


def prompt(served: Any, index: int = -1) -> str:
    text: str = served.tokenizer.decode(served.engine.requests[index].prompt_ids)
    return text


async def test_shape_of_an_answer(served: Any) -> None:
    served.answers("Paris.")
    data = await served.chat()
    assert data["id"].startswith("chatcmpl-") and data["object"] == "chat.completion" and data["model"] == "tiny"
    (choice,) = data["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Paris.", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert data["usage"]["completion_tokens"] == len(served.tokenizer.encode("Paris.")) + 1


async def test_messages_go_through_the_template(served: Any) -> None:
    """A29, A32."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": []},
        {"role": "user", "content": "d"},
    ]
    await served.chat(messages=messages)
    assert prompt(served) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_history_with_tool_calls_reaches_the_template_untouched(served: Any) -> None:
    seen: list[Any] = []

    class Recorder:
        syntax = None

        def render(self, messages: Any, **options: Any) -> str:
            seen.append((messages, options))
            return "prompt"

        def encode(self, rendered: str) -> list[int]:
            ids: list[int] = served.tokenizer.encode(rendered)
            return ids

    served.state.chat_format = Recorder()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
        {"role": "user", "content": "y"},
    ]
    await served.chat(messages=messages, chat_template_kwargs={"enable_thinking": False})
    ((given, options),) = seen
    assert given == messages
    assert options == {
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "template_kwargs": {"enable_thinking": False},
        "request_template": None,
    }


async def test_last_message_can_be_continued(served: Any) -> None:
    """A50."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The capital is"}]
    await served.chat(messages=messages, continue_final_message=True)
    assert prompt(served).endswith("<|im_start|>assistant\nThe capital is")
    await served.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt(served) == prompt(served, 0)
    error = await served.refused(
        PATH, {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    )
    assert error["param"] == "continue_final_message"
    error = await served.refused(PATH, {"messages": messages[:1], "continue_final_message": True})
    assert "assistant" in error["message"]


async def test_generation_prompt_can_be_left_out(served: Any) -> None:
    await served.chat(add_generation_prompt=False)
    assert prompt(served).endswith("Hello<|im_end|>\n")


async def test_default_max_tokens_is_the_rest_of_the_context(served: Any) -> None:
    await served.chat()
    await served.chat(max_tokens=7)
    await served.chat(max_tokens=7, max_completion_tokens=3)
    (default, older, newer) = served.engine.requests
    assert default.params.max_tokens == 128 - len(default.prompt_ids)
    assert (older.params.max_tokens, newer.params.max_tokens) == (7, 3)


async def test_choices(served: Any) -> None:
    served.answers("x")
    data = await served.chat(n=3)
    assert [choice["index"] for choice in data["choices"]] == [0, 1, 2]
    assert data["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_logprobs_in_chat_shape(served: Any, top: int | None) -> None:
    """A19."""
    ids = served.tokenizer.encode("\u20ac")
    served.engine.script = lambda _: ids
    data = await served.chat(logprobs=True, top_logprobs=top)
    content = data["choices"][0]["logprobs"]["content"]
    raw = [served.tokenizer.token_bytes(token_id) for token_id in ids]
    assert [item["bytes"] for item in content] == [list(piece) for piece in raw]
    assert [item["logprob"] for item in content] == [fake_logprob(token_id) for token_id in ids]
    first = served.tokenizer.token_text(0)
    for item in content:
        assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(item["top_logprobs"]) == (top or 0)
        if top:
            assert item["top_logprobs"][0] == {
                "token": first,
                "logprob": fake_logprob(0),
                "bytes": list(first.encode()),
            }


async def test_stream_has_role_then_text_then_reason(served: Any) -> None:
    """A10, A15: the reason comes alone."""
    served.answers("one two")
    body = {"messages": [{"role": "user", "content": "x"}]}
    events = await served.events(PATH, body)
    first, *deltas, last = [event["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in deltas) == "one two"
    assert [choice["finish_reason"] for choice in (first, *deltas)] == [None] * (len(deltas) + 1)
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all("usage" not in event for event in events)


async def test_stream_with_logprobs_carries_an_entry_per_token(served: Any) -> None:
    """A19."""
    served.answers("one two")
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    events = await served.events(PATH, body)
    chunks = [event["choices"][0] for event in events]
    tokens = [item["token"] for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"]["content"]]
    assert tokens == [served.tokenizer.token_text(i) for i in served.tokenizer.encode("one two")]


async def test_stream_of_several_choices(served: Any) -> None:
    """A18."""
    served.answers("one two")
    events = await served.events(
        PATH,
        {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream_options": {"include_usage": True}},
    )
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3 * (
        len(served.tokenizer.encode("one two")) + 1
    )
    for index in range(3):
        own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "one two"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]


async def test_template_kwargs_that_are_reserved_or_unknown(served: Any) -> None:
    """F8."""
    for kwargs in ({"chat_template": "x"}, {"tokenize": False}, {"no_such": 1}):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}
        error = await served.refused(PATH, body)
        assert error["param"] == "chat_template_kwargs"


async def test_a_model_without_template(served: Any) -> None:
    served.state.chat_format = None
    error = await served.refused(PATH, {"messages": [{"role": "user", "content": "x"}]})
    assert "chat template" in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "foo": 1}], "messages[1].foo"),
    ],
)
async def test_messages_that_are_refused(served: Any, messages: Any, param: str) -> None:
    error = await served.refused(PATH, {"messages": messages})
    assert error["param"] == param
    assert served.engine.received == []


async def test_missing_messages(served: Any) -> None:
    assert (await served.refused(PATH, {}))["param"] == "messages"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", []),
        ("reasoning_effort", "low"),
        ("chat_template", "x"),
        ("modalities", ["text"]),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("top_logprobs", 2),
        ("prompt", "x"),
        ("echo", True),
    ],
)
async def test_fields_that_are_refused(served: Any, field: str, value: Any) -> None:
    error = await served.refused(PATH, {"messages": [{"role": "user", "content": "x"}], field: value})
    assert error["param"] == field and field in error["message"]


async def test_no_tools_is_fine(served: Any) -> None:
    await served.chat(tools=[], tool_choice="none")


async def test_a_long_conversation_is_refused_not_cut(served: Any) -> None:
    error = await served.refused(PATH, {"messages": [{"role": "user", "content": "word " * 200}]})
    assert error["code"] == "context_length_exceeded" and "128" in error["message"]


async def test_without_a_template_the_way_out_is_named(serve: Any, tokenizer: Any, tmp_path: Any) -> None:
    served = await serve(chat_format=TemplateChatFormat(tokenizer, tmp_path))
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = await served.refused(path, body)
        assert error["param"] == "messages"
        assert error["message"] == (
            "messages: this model has no chat template; it completes prompts only; use /v1/completions"
        )


async def test_an_assistant_message_without_content_or_calls_says_what_it_needs(served: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    error = await served.refused("/v1/chat/completions", {"messages": messages})
    assert error["param"] == "messages[1].content" and "beside tool_calls only" in error["message"]
