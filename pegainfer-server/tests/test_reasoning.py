"""Thinking through POST /v1/chat/completions: where it begins and ends, how it is told, and what it has to do with stops and formats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.chat_syntax import qwen_json_syntax
from pegainfer_core.structured import Thinking
from pegainfer_core.testing.tiny_chat import write_tiny_chat
from pegainfer_core.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
BODY: dict[str, Any] = {"messages": [USER]}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
async def thinker(serve: Any, tmp_path: Path) -> Callable[..., Awaitable[Any]]:
    """Serves a scripted model that may think."""

    async def make(**fields: Any) -> Any:
        tokenizer = load_tokenizer(write_tiny_chat(tmp_path))
        chat_format = TemplateChatFormat(tokenizer, tmp_path, qwen_json_syntax)
        return await serve(tokenizer=tokenizer, chat_format=chat_format, max_model_len=1024, **fields)

    return make


async def both(served: Any, **fields: Any) -> tuple[dict[str, Any], str]:
    """(message, finish reason) of an answer, which must be the same in a stream."""
    body = {**BODY, **fields}
    (choice,) = (await served.chat(**body))["choices"]
    told: dict[str, str] = {}
    reason = None
    for event in await served.events(PATH, body):
        (part,) = event["choices"]
        for name, text in part["delta"].items():
            told[name] = told.get(name, "") + text
        reason = part["finish_reason"]
    message = choice["message"]
    assert reason == choice["finish_reason"]
    assert told.get("content", "") == (message["content"] or "")
    assert told.get("reasoning_content") == message.get("reasoning_content")
    return message, str(reason)


@pytest.mark.parametrize(
    ("text", "fields", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", {}, "Hm.", "Yes."),
        ("Yes.", {}, None, "Yes."),
        ("Hm.\n</think>\n\nYes.", THINK, "Hm.", "Yes."),
        ("Yes.", DIRECT, None, "Yes."),
        ("Yes </think>.", DIRECT, None, "Yes </think>."),
        ("<think></think>Yes.", {}, None, "Yes."),
    ],
)
async def test_the_prompt_says_whether_an_answer_begins_with_thinking(
    thinker: Any, text: str, fields: dict[str, Any], reasoning: str | None, content: str
) -> None:
    """A41: with thinking off all is content. A42: where the template has opened it, only its end is written."""
    served = await thinker()
    served.answers(text)
    message, reason = await both(served, **fields)
    assert (message.get("reasoning_content"), message["content"], reason) == (reasoning, content, "stop")


async def test_what_users_write_opens_and_closes_nothing(thinker: Any) -> None:
    """B10: only the end of the prompt counts."""
    served = await thinker()
    served.answers("Yes.")
    for content in ("<think>", "</think>", "a <think> b"):
        message, _ = await both(served, messages=[{"role": "user", "content": content}])
        assert message["content"] == "Yes."
    served.answers("Hm.</think>Yes.")
    message, _ = await both(served, messages=[{"role": "user", "content": "</think>"}], **THINK)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_thinking_that_is_cut_off_is_no_content(thinker: Any) -> None:
    """A43."""
    served = await thinker()
    served.answers("Hm, let me see. So far, so good.</think>Yes.")
    message, reason = await both(served, max_tokens=8, **THINK)
    assert reason == "length" and message["content"] is None
    assert "Hm, let me see. So far, so good.".startswith(message["reasoning_content"])


async def test_stop_strings_end_the_answer_and_not_the_thinking(thinker: Any) -> None:
    """A5; `stop_in_reasoning` lets them end the thinking too."""
    served = await thinker()
    served.answers("One.\n\nQuestion: two?</think>Three.\n\nQuestion: four?")
    fields = {**THINK, "stop": ["Question:"]}
    message, reason = await both(served, **fields)
    assert (message["reasoning_content"], message["content"]) == ("One.\n\nQuestion: two?", "Three.\n\n")
    assert reason == "stop"
    message, _ = await both(served, **fields, stop_in_reasoning=True)
    assert (message["reasoning_content"], message["content"]) == ("One.\n\n", None)
    message, _ = await both(served, **fields, include_stop_str_in_output=True)
    assert message["content"] == "Three.\n\nQuestion:"


@pytest.mark.parametrize("tokens_per_step", [1, 5, 100])
async def test_usage_counts_the_tokens_of_thinking(thinker: Any, tokens_per_step: int) -> None:
    served = await thinker(tokens_per_step=tokens_per_step)
    thought = "Hm, so it is.</think>"
    served.answers(thought + "Yes.")
    usage = (await served.chat(**BODY, **THINK))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(served.tokenizer.encode(thought))}
    usage = (await served.chat(**BODY, **DIRECT))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
async def test_thinking_of_the_history_reaches_the_template(thinker: Any, field: str) -> None:
    """A44."""
    served = await thinker()
    await served.chat(messages=[USER, {"role": "assistant", "content": "Yes.", field: "Hm."}, USER])
    prompt = served.tokenizer.decode(served.engine.requests[0].prompt_ids)
    assert "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("configured", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
async def test_the_field_that_tells_thinking_is_the_operators_choice(
    thinker: Any, configured: str, names: set[str]
) -> None:
    served = await thinker(reasoning_field=configured)
    served.answers("Hm.</think>Yes.")
    body = {**BODY, **THINK}
    message = (await served.chat(**body))["choices"][0]["message"]
    assert {name for name, text in message.items() if text == "Hm."} == names
    deltas = [event["choices"][0]["delta"] for event in await served.events(PATH, body)]
    assert {name for delta in deltas for name in delta} == {"role", "content"} | names
    message = (await served.chat(**body, include_reasoning=False))["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"} and message["content"] == "Yes."
    deltas = [event["choices"][0]["delta"] for event in await served.events(PATH, {**body, "include_reasoning": False})]
    assert {name for delta in deltas for name in delta} == {"role", "content"}


async def test_thinking_may_be_continued(thinker: Any) -> None:
    served = await thinker()
    served.answers(" that it is.</think>Yes.")
    messages = [USER, {"role": "assistant", "content": "<think>\nI believe"}]
    message, _ = await both(served, messages=messages, continue_final_message=True)
    assert (message["reasoning_content"], message["content"]) == (" that it is.", "Yes.")
    served.answers(" <think> is a word.")
    messages = [USER, {"role": "assistant", "content": "Well,"}]
    message, _ = await both(served, messages=messages, continue_final_message=True)
    assert message["content"] == " <think> is a word."


async def test_the_engine_learns_where_thinking_ends_if_something_depends_on_it(thinker: Any) -> None:
    """A45: a format binds what follows the thinking. Budgets under both names."""
    served = await thinker()
    begin, end = (served.tokenizer.token_id(mark) for mark in ("<think>", "</think>"))
    json_object = {"response_format": {"type": "json_object"}}
    cases: list[tuple[dict[str, Any], Thinking | None]] = [
        ({}, None),
        (THINK, None),
        (json_object, Thinking(end_id=end, start_id=begin)),
        ({**json_object, **THINK}, Thinking(end_id=end, start_id=begin, open=True)),
        ({**json_object, **DIRECT}, None),
        ({"thinking_budget": 7}, Thinking(end_id=end, start_id=begin, budget=7)),
        ({"max_thinking_tokens": 0, **THINK}, Thinking(end_id=end, start_id=begin, open=True, budget=0)),
    ]
    for fields, thinking in cases:
        await served.chat(**BODY, **fields)
        assert served.engine.requests[-1].params.thinking == thinking


async def test_budgets_that_are_refused(thinker: Any, served: Any) -> None:
    able = await thinker()
    for fields in ({"thinking_budget": -1}, {"thinking_budget": 1.5}, {"thinking_budget": 1, "max_thinking_tokens": 2}):
        assert (await able.refused(PATH, {**BODY, **fields}))["param"] in fields
    assert (await served.refused(PATH, {**BODY, "thinking_budget": 5}))["param"] == "thinking_budget"
