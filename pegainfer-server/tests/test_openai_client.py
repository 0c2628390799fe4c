"""The official OpenAI client, unmodified, against a real server on a loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
import uvicorn

Serve = Callable[..., Awaitable[Any]]
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "The capital of France is Paris."


@pytest.fixture
async def live(serve: Serve) -> AsyncIterator[Any]:
    """(application, client, base URL) with the server running in this event loop."""
    served = await serve(api_keys=("key",), max_model_len=2048)
    served.answers(TEXT)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(served.app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        yield served, client, url
    server.should_exit = True
    await running


async def test_chat(live: Any) -> None:
    served, client, _ = live
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(served.engine.requests[0].prompt_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_stream(live: Any) -> None:
    _, client, _ = live
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_answers_can_be_sent_back(live: Any) -> None:
    _, client, _ = live
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    history = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    assert (await client.chat.completions.create(model="tiny", messages=history)).choices[0].message.content == TEXT


async def test_chat_options(live: Any) -> None:
    _, client, _ = live
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, seed=1, logprobs=True, top_logprobs=2, stop=[" France"], user="me"
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content == "The capital of"
    content = answer.choices[0].logprobs.content
    assert "".join(item.token for item in content) == "The capital of"
    assert all(len(item.top_logprobs) == 2 for item in content)
    extra = {"top_k": 5, "chat_template_kwargs": {}}
    await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)


async def test_completions(live: Any) -> None:
    served, client, _ = live
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=30, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [f"a{TEXT}", f"b{TEXT}"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    ids = served.tokenizer.encode("Hello")
    assert (await client.completions.create(model="tiny", prompt=ids, max_tokens=30)).choices[0].text == TEXT
    stream = await client.completions.create(model="tiny", prompt=ids, max_tokens=30, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_models(live: Any) -> None:
    _, client, _ = live
    assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
    assert (await client.models.retrieve("alias")).id == "alias"


async def test_errors_are_the_client_s_own_exceptions(live: Any) -> None:
    served, client, url = live
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        await create(model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    stranger = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    async with stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="tiny", messages=MESSAGES)
    served.engine.rejection = ("queue_full", "too many requests wait")
    with pytest.raises(openai.RateLimitError, match="too many requests wait"):
        await create(model="tiny", messages=MESSAGES, stream=True)
    served.engine.rejection = None
    served.engine.died("gone")
    with pytest.raises(openai.InternalServerError, match="gone"):
        await create(model="tiny", messages=MESSAGES)


async def test_engine_death_reaches_an_open_stream(live: Any) -> None:
    served, client, _ = live
    served.engine.auto = False
    opening = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    while not served.engine.open_ids:
        await asyncio.sleep(0)
    served.engine.step()
    stream = await opening
    served.engine.died("killed")
    with pytest.raises(openai.APIError, match="killed"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("streaming", [True, False])
async def test_closed_connections_end_their_requests(live: Any, streaming: bool) -> None:
    served, _, url = live
    served.engine.auto = False
    served.engine.script = lambda _: [300] * 1000
    headers = {"Authorization": "Bearer key"}
    body = {"prompt": "a", "max_tokens": 1000, "stream": streaming}

    async def request() -> None:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as http:
            await http.post("/v1/completions", json=body)

    tasks = [asyncio.create_task(request()) for _ in range(20)]
    while len(served.engine.open_ids) < 20:
        await asyncio.sleep(0)
    for _ in range(3):
        served.engine.step()
    for task in tasks[:10]:
        task.cancel()
    while len(served.engine.open_ids) > 10:
        await asyncio.sleep(0)
    assert len(served.engine.aborted) == 10 and served.engine.num_open == 10
    for task in tasks[10:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while served.engine.open_ids:
        await asyncio.sleep(0)
    assert served.engine.num_open == 0


async def test_the_body_limit_holds_on_the_wire(live: Any) -> None:
    served, _, url = live
    served.state.max_body_bytes = 10_000
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer key"}) as http:
        response = await http.post("/v1/completions", json={"prompt": "x" * 20_000})
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert (await http.get("/health")).status_code == 200
