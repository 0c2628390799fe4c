"""Tool calls through POST /v1/chat/completions: what the model is shown, what its answer becomes, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.chat_syntax import (
    SyntaxOf,
    gemma_syntax,
    glm_syntax,
    hermes_syntax,
    kimi_syntax,
    qwen_json_syntax,
    qwen_xml_syntax,
)
from pegainfer_core.testing.tiny_chat import PLAIN_MARKS, write_tiny_chat
from pegainfer_core.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
KIMI_MARKS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)
GEMMA_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of some days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "x"}
BODY: dict[str, Any] = {"messages": [USER], "tools": [WEATHER, NOW]}

Chats = Callable[..., Awaitable[Any]]


@pytest.fixture
async def chats(serve: Any, tmp_path: Path) -> Chats:
    """Serves a scripted model whose family has this syntax."""

    async def make(
        syntax: SyntaxOf | None,
        plain: tuple[str, ...] = PLAIN_MARKS,
        special: tuple[str, ...] = (),
        tokens_per_step: int = 1,
        **template: str,
    ) -> Any:
        write_tiny_chat(tmp_path, plain, special, **template)
        tokenizer = load_tokenizer(tmp_path)
        chat_format = TemplateChatFormat(tokenizer, tmp_path, syntax)
        return await serve(
            tokenizer=tokenizer, chat_format=chat_format, max_model_len=4096, tokens_per_step=tokens_per_step
        )

    return make


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's choice, put together as clients do."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reasons = []
    for event in events:
        (choice,) = event["choices"]
        reasons.append(choice["finish_reason"])
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for part in choice["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"} and part["function"]["arguments"]
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert not any(reasons[:-1]) and reasons[-1]
    return message | {"tool_calls": calls, "finish_reason": reasons[-1]}


ARGUMENTS = {"city": "Paris\n\u00e9", "days": 3}
SYNTAXES: dict[str, tuple[SyntaxOf, tuple[str, ...], str]] = {
    "hermes": (
        qwen_json_syntax,
        (),
        '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris\\n\u00e9", "days": 3}}'
        '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "xml": (
        qwen_xml_syntax,
        (),
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n\u00e9\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm": (
        glm_syntax,
        (),
        "<think>Hm.</think>I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris\n\u00e9</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
    ),
    "kimi": (
        kimi_syntax,
        KIMI_MARKS,
        "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris\\n\u00e9", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gemma": (
        gemma_syntax,
        GEMMA_MARKS,
        '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Paris\n\u00e9<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
    ),
}


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
@pytest.mark.parametrize("name", SYNTAXES)
async def test_a_stream_is_the_whole_answer_however_steps_cut_it(chats: Chats, name: str, tokens_per_step: int) -> None:
    """A31, A34, A35, A36, B7: arguments are a string; id, type and name come once; no marker is told."""
    syntax, special, text = SYNTAXES[name]
    served = await chats(syntax, () if special else PLAIN_MARKS, special, tokens_per_step)
    served.answers(text)
    (choice,) = (await served.chat(**BODY))["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    assert [(call["type"], call["function"]["name"]) for call in message["tool_calls"]] == [
        ("function", "get_weather"),
        ("function", "now"),
    ]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [ARGUMENTS, {}]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    if name == "kimi":
        assert ids == ["functions.get_weather:0", "functions.now:1"]

    stream = joined(await served.events(PATH, BODY))
    for call, whole in zip(stream["tool_calls"], message["tool_calls"], strict=True):
        assert call["function"] == whole["function"] and call["type"] == whole["type"]
    assert (stream["content"], stream["reasoning_content"]) == ("I look.", "Hm.")
    assert stream["finish_reason"] == "tool_calls"


async def test_finish_reasons_of_the_kinds_of_choice(chats: Chats) -> None:
    """A11: a named call ends with stop, as in the OpenAI API; every other with tool_calls; the same in a stream."""
    served = await chats(qwen_json_syntax)
    named = {"type": "function", "function": {"name": "now"}}
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    cases: list[tuple[str, Any, str]] = [
        (call, "auto", "tool_calls"),
        (call, "required", "tool_calls"),
        (call, named, "stop"),
        ("Hi.", "auto", "stop"),
    ]
    for text, tool_choice, reason in cases:
        served.answers(text)
        (choice,) = (await served.chat(**BODY, tool_choice=tool_choice))["choices"]
        stream = joined(await served.events(PATH, {**BODY, "tool_choice": tool_choice}))
        assert (choice["finish_reason"], stream["finish_reason"]) == (reason, reason)
        assert bool(stream["tool_calls"]) == ("tool_calls" in choice["message"]) == (text == call)


async def test_a_call_that_never_got_a_name_is_no_call(chats: Chats) -> None:
    """A12: required, cut by max_tokens: length, no tool_calls, no markup in the content."""
    served = await chats(qwen_json_syntax)
    served.answers('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    body = {**BODY, "tool_choice": "required", "max_tokens": 3}
    (choice,) = (await served.chat(**body))["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] == ""
    stream = joined(await served.events(PATH, body))
    assert (stream["finish_reason"], stream["tool_calls"], stream["content"]) == ("length", [], "")


async def test_a_call_that_is_cut_keeps_what_there_is(chats: Chats) -> None:
    served = await chats(qwen_json_syntax)
    served.answers('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    length = len(served.tokenizer.encode('<tool_call>\n{"name": "get_weather", "arguments": {"ci'))
    (choice,) = (await served.chat(**BODY, max_tokens=length))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"c')


async def test_without_parallel_calls_the_answer_ends_with_the_first(chats: Chats) -> None:
    syntax, _, text = SYNTAXES["hermes"]
    served = await chats(syntax)
    served.answers(text)
    for tool_choice in ("auto", "required"):
        data = await served.chat(**BODY, parallel_tool_calls=False, tool_choice=tool_choice)
        (choice,) = data["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
        assert choice["finish_reason"] == "tool_calls"
        assert data["usage"]["completion_tokens"] < len(served.tokenizer.encode(text))
    assert len(served.engine.aborted) == 2


async def test_the_model_is_shown_tools_unless_it_may_not_call(chats: Chats) -> None:
    served = await chats(qwen_json_syntax)
    call = '<tool_call>{"name": "now"}</tool_call>'
    served.answers(call)
    for tool_choice, shown in ((None, True), ("auto", True), ("none", False)):
        (choice,) = (await served.chat(**BODY, tool_choice=tool_choice))["choices"]
        prompt = served.tokenizer.decode(served.engine.requests[-1].prompt_ids)
        assert ("get_weather" in prompt) == shown
        assert ("tool_calls" in choice["message"]) == shown
    assert choice["message"]["content"] == call
    (tokens,) = [await served.post("/tokenize", {"messages": [USER], "tools": [WEATHER, NOW]})]
    assert tokens["tokens"] == served.engine.requests[0].prompt_ids


async def test_calls_that_must_be_made_are_a_grammar(chats: Chats) -> None:
    """Required: any of the tools, one or more; named: that one, once; auto: none, unless the text has a format."""
    served = await chats(qwen_json_syntax)
    named = {"type": "function", "function": {"name": "now"}}
    format_ = {"type": "json_object"}
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {}, {"response_format": format_}):
        await served.chat(**BODY, **fields)
    required, one, auto, formatted = (request.params.grammar for request in served.engine.requests)
    assert required.kind == "lark" and "get_weather" in required.text and "now" in required.text
    assert "now" in one.text and "get_weather" not in one.text
    assert auto is None
    assert "get_weather" in formatted.text and '"object"' in formatted.text


HISTORY: list[tuple[Any, str]] = [
    ('{"city": "Rome", "days": 2}', ' city="Rome" days=2'),
    ({"city": "Rome"}, ' city="Rome"'),
    ("", ""),
    (None, ""),
    ('{"city": "Ro', ' arguments="{\\"city\\": \\"Ro"'),
    ("[1]", ' arguments="[1]"'),
]


@pytest.mark.parametrize(("arguments", "shown"), HISTORY)
async def test_calls_and_results_of_the_history_reach_the_template(chats: Chats, arguments: Any, shown: str) -> None:
    """A28: content null beside calls; arguments as a string, as an object, and as what a model broke."""
    served = await chats(qwen_json_syntax)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    await served.chat(messages=messages, tools=[WEATHER])
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt_ids)
    assert f"<|im_start|>assistant\n\n<tool_call>call_1 get_weather{shown}</tool_call><|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny for call_1<|im_end|>" in prompt


async def test_kimi_ids_go_on_through_the_dialogue(chats: Chats) -> None:
    """A40: ids of another form in the history are rewritten, and new ones count on."""
    syntax, special, text = SYNTAXES["kimi"]
    served = await chats(syntax, (), special)
    served.answers(text)
    calls = [{"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_b", "content": "2"},
    ]
    (choice,) = (await served.chat(messages=messages, tools=BODY["tools"]))["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.get_weather:2", "functions.now:3"]
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt_ids)
    assert "<tool_call>functions.a:0 a" in prompt and "2 for functions.b:1" in prompt


@pytest.mark.parametrize("with_tools", [True, False])
async def test_markers_of_special_tokens_are_never_told(chats: Chats, with_tools: bool) -> None:
    """B7: with tools the parser sees them; without, nobody does; spelled out they are ordinary text (B10)."""
    syntax, special, text = SYNTAXES["kimi"]
    served = await chats(syntax, (), special)
    spelled = served.tokenizer.encode("<|tool_call") + served.tokenizer.encode("_begin|>")
    ids = served.tokenizer.encode(text) + spelled
    served.engine.script = lambda _: ids
    (choice,) = (await served.chat(**(BODY if with_tools else {"messages": [USER]})))["choices"]
    message = choice["message"]
    assert bool(message.get("tool_calls")) == with_tools
    content = message["content"]
    assert content.endswith("<|tool_call_begin|>") and content.count("<|") == 1
    assert content.startswith("I look." if with_tools else "I look.functions.get_weather:0{")


async def test_logprobs_are_told_for_every_token(chats: Chats) -> None:
    syntax, _, text = SYNTAXES["hermes"]
    for tokens_per_step in (1, 1000):
        served = await chats(syntax, tokens_per_step=tokens_per_step)
        served.answers(text)
        ids = served.tokenizer.encode(text)
        body = {**BODY, "logprobs": True, "return_token_ids": True}
        (choice,) = (await served.chat(**body))["choices"]
        tokens = [list(served.tokenizer.token_bytes(token_id)) for token_id in ids]
        assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == tokens
        events = await served.events(PATH, body)
        parts = [event["choices"][0] for event in events]
        told = [entry["bytes"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert told == tokens
        assert [token_id for part in parts for token_id in part.get("token_ids", [])] == ids


async def test_tools_for_a_template_that_does_not_show_them(chats: Chats, checkpoint: Path) -> None:
    """Tools, calls and results are then text, in the words of the model's syntax."""
    template = json.loads((checkpoint / "tokenizer_config.json").read_text())["chat_template"]
    served = await chats(hermes_syntax, template=template)
    served.answers('<tool_call>{"name": "now"}</tool_call>')
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "one"},
    ]
    (choice,) = (await served.chat(messages=messages, tools=BODY["tools"]))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt_ids)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n") and json.dumps(WEATHER) in prompt
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>" in prompt


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [NOW] * 600}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tools": [NOW], "guided_grammar": 'start: "x"'}, "guided_grammar"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_tools_that_are_refused(chats: Chats, fields: dict[str, Any], param: str) -> None:
    served = await chats(qwen_json_syntax)
    error = await served.refused(PATH, {"messages": [USER], **fields})
    assert error["param"] == param
    assert served.engine.received == []


async def test_a_family_without_calls_refuses_tools(chats: Chats) -> None:
    served = await chats(None)
    assert (await served.refused(PATH, BODY))["param"] == "tools"
    (choice,) = (await served.chat(**BODY, tool_choice="none"))["choices"]
    assert msgspec.json.encode(choice)
