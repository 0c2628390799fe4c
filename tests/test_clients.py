"""The clients people have, unmodified, against a real server on SmolLM2: the SDKs of OpenAI and Anthropic, and LangChain.

What the model says is not judged, but that every client understands the server: texts, streams, tool calls, parsed objects, errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pegainfer_core.testing.served import served
from pegainfer_llama.smollm2 import ensure_checkpoint
from pydantic import BaseModel, SecretStr

KEY = "sk-test"
QUESTION = "What is the capital of France?"
CHAT: Any = [{"role": "user", "content": QUESTION}]
WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION: Any = {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]

FORCED: Any = {"type": "any", "disable_parallel_tool_use": True}
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""For Anthropic's SDK, whose newer versions have no argument for it."""


class Capital(BaseModel):
    """What an answer is parsed into."""

    city: Literal["Paris", "Rome", "Madrid"]
    is_large: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(ensure_checkpoint(), "--dtype", "float32", "--api-key", KEY, "--max-model-len", "2048") as server:
        yield server.url


# OpenAI


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def check_weather(arguments: str) -> None:
    """Arguments that a grammar has forced."""
    given = json.loads(arguments)
    assert given["city"] in ("Paris", "Rome") and 1 <= given["days"] <= 9 and len(given) == 2


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test", messages=CHAT, max_completion_tokens=40, temperature=0)
    text = answer.choices[0].message.content
    assert text is not None and "Paris" in text and answer.usage is not None
    chunks = client.chat.completions.create(
        model="test", messages=CHAT, max_completion_tokens=40, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_openai_stream_helper(client: openai.OpenAI) -> None:
    """A10, A15, A19: the SDK puts the answer together from its events."""
    options: Any = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}
    with client.chat.completions.stream(
        model="test", messages=CHAT, max_completion_tokens=30, temperature=0, **options
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1 and "content.delta" in kinds and "logprobs.content.delta" in kinds
    (choice,) = final.choices
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is not None and choice.logprobs.content
    assert final.usage is not None and len(choice.logprobs.content) in (
        final.usage.completion_tokens,
        final.usage.completion_tokens - 1,
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_openai_tools(client: openai.OpenAI, choice: Any) -> None:
    """A11, A31, A36."""
    fields: Any = {"model": "test", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    fields |= {"parallel_tool_calls": False, "max_completion_tokens": 60}
    answer = client.chat.completions.create(**fields)
    message = answer.choices[0].message
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function" and call.function.name == "weather"
    check_weather(call.function.arguments)
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == answer.choices[0].finish_reason and streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history: Any = [*CHAT, message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(model="test", messages=history, tools=TOOLS, max_completion_tokens=5)
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_openai_parse(client: openai.OpenAI) -> None:
    fields: Any = {"model": "test", "messages": CHAT, "temperature": 0, "max_completion_tokens": 60}
    parsed = client.chat.completions.parse(**fields, response_format=Capital).choices[0].message.parsed
    assert isinstance(parsed, Capital)
    with client.chat.completions.stream(**fields, response_format=Capital) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="test",
        prompt=["The capital of France is", "1, 2, 3,"],
        max_tokens=5,
        temperature=0,
        logprobs=1,
        echo=True,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Paris" in answer.choices[0].text and answer.choices[1].text.startswith("1, 2, 3, 4")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None


def test_openai_responses(client: openai.OpenAI) -> None:
    fields: Any = {"model": "test", "input": QUESTION, "instructions": "Be brief.", "temperature": 0}
    answer = client.responses.create(**fields, max_output_tokens=40)
    assert "Paris" in answer.output_text and answer.status in ("completed", "incomplete")
    with client.responses.stream(**fields, max_output_tokens=40) as stream:
        kinds = [event.type for event in stream]
        if answer.status == "completed":
            assert stream.get_final_response().output_text == answer.output_text
    assert kinds[0] == "response.created" and kinds[-1] == f"response.{answer.status}"
    parsed = client.responses.parse(**fields, max_output_tokens=60, text_format=Capital)
    assert isinstance(parsed.output_parsed, Capital)


def test_openai_responses_tools(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    fields: Any = {"model": "test", "tools": tools, "temperature": 0, "max_output_tokens": 60}
    fields["parallel_tool_calls"] = False
    answer = client.responses.create(**fields, input=CHAT, tool_choice="required")
    call = next(item for item in answer.output if item.type == "function_call")
    check_weather(call.arguments)
    with client.responses.stream(**fields, input=CHAT, tool_choice="required") as stream:
        streamed = stream.get_final_response().output
    assert next(item.arguments for item in streamed if item.type == "function_call") == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history: Any = [*CHAT, *answer.output, result]
    assert client.responses.create(**{**fields, "max_output_tokens": 5}, input=history).output


def test_openai_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test"]
    assert client.models.retrieve("test").id == "test"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="test", input="x", previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model="test", input="x")


# Anthropic


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "test", "messages": CHAT, "system": "Be brief.", "max_tokens": 40, **GREEDY}
    answer = claude.messages.create(**fields)
    (block,) = answer.content
    assert block.type == "text" and "Paris" in block.text and answer.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.content[0].model_dump() | block.model_dump() == final.content[0].model_dump()
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model="test", messages=CHAT, system="Be brief.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}]
    fields: Any = {"model": "test", "tools": tools, "max_tokens": 60, **GREEDY}
    answer = claude.messages.create(**fields, messages=CHAT, tool_choice=FORCED)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and call.name == "weather"
    check_weather(json.dumps(call.input))
    with claude.messages.stream(**fields, messages=CHAT, tool_choice=FORCED) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [*CHAT, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**{**fields, "max_tokens": 5}, messages=history).content


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=CHAT, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="test", messages=CHAT, max_tokens=5, extra_body={"temperature": -1})
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model="test", messages=CHAT, max_tokens=5)


# LangChain


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def langchain(url: str, request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(
        model="test",
        base_url=f"{url}/v1",
        api_key=SecretStr(KEY),
        temperature=0,
        max_retries=0,
        max_completion_tokens=60,
        use_responses_api=request.param,
    )


def test_langchain_chat(langchain: ChatOpenAI) -> None:
    answer = langchain.invoke([HumanMessage(QUESTION)])
    assert "Paris" in answer.text and answer.usage_metadata is not None
    assert "".join(chunk.text for chunk in langchain.stream([HumanMessage(QUESTION)])) == answer.text


def test_langchain_tools(langchain: ChatOpenAI) -> None:
    bound = langchain.bind_tools([weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    answer = bound.invoke([HumanMessage(QUESTION)])
    call = answer.tool_calls[0]
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")
    history = [HumanMessage(QUESTION), answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert langchain.bind_tools([weather]).invoke(history).response_metadata


def test_langchain_structured_output(langchain: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        parsed = langchain.with_structured_output(Capital, method=method).invoke(QUESTION)
        assert isinstance(parsed, Capital), method


def test_langchain_completions(url: str) -> None:
    model = OpenAI(model="test", base_url=f"{url}/v1", api_key=SecretStr(KEY), temperature=0, max_tokens=5)
    text = model.invoke("The capital of France is")
    assert "Paris" in text and "".join(model.stream("The capital of France is")) == text
