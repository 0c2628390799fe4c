"""Fields of both generation routes beside sampling: each has an effect that is seen here, or is refused by name (A51)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pegainfer_core.testing.fake_client import fake_logprob

Serve = Callable[..., Awaitable[Any]]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 64},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
}
BOTH = pytest.mark.parametrize("path", sorted(BODIES))


@BOTH
async def test_what_a_client_says_about_itself_is_in_the_log(
    served: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pegainfer_server")
    fields = {"user": "ann\n", "safety_identifier": "s-1", "metadata": {"run": "7"}}
    await served.post(path, {**BODIES[path], **fields, "store": False, "prompt_cache_key": "k"})
    (line,) = [record.getMessage() for record in caplog.records if "output tokens" in record.getMessage()]
    assert line.endswith("user 'ann\\n', safety_identifier 's-1', metadata {'run': '7'}")


@BOTH
@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, None),
        ({"priority": 3}, 3, None),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default", "priority": -4}, -4, "default"),
        ({"service_tier": "flex"}, 1, "flex"),
        ({"service_tier": "priority"}, -1, "priority"),
    ],
)
async def test_tiers_are_priorities(
    served: Any, path: str, fields: dict[str, Any], priority: int, tier: str | None
) -> None:
    data = await served.post(path, {**BODIES[path], **fields})
    assert served.engine.requests[0].priority == priority
    assert data.get("service_tier") == tier
    events = await served.events(path, {**BODIES[path], **fields})
    assert {event.get("service_tier") for event in events} == {tier}


async def test_a_tier_and_another_priority_contradict_each_other(served: Any) -> None:
    body = {**BODIES[CHAT], "service_tier": "flex", "priority": 2}
    assert (await served.refused(CHAT, body))["param"] == "priority"


@BOTH
@pytest.mark.parametrize("n", [1, 2])
async def test_timeout_ends_what_is_open(serve: Serve, path: str, n: int) -> None:
    served = await serve(auto=False)
    response = await served.http.post(path, json={**BODIES[path], "timeout": 0.01, "n": n})
    assert response.status_code == 408 and response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("timeout", "timeout")
    assert len(served.engine.aborted) == n
    assert served.engine.open_ids == [] and served.engine.num_open == 0


@BOTH
async def test_timeout_in_a_stream_is_its_last_event(serve: Serve, path: str) -> None:
    served = await serve(auto=False)
    task = asyncio.create_task(served.http.post(path, json={**BODIES[path], "timeout": 0.05, "stream": True}))
    while not served.engine.open_ids:
        await asyncio.sleep(0)
    served.engine.step()
    text = (await task).text
    assert '"code":"timeout"' in text.split("\n\n")[-3] and text.endswith("data: [DONE]\n\n")
    assert served.engine.open_ids == [] and served.engine.num_open == 0


@BOTH
async def test_a_timeout_that_is_not_reached_changes_nothing(served: Any, path: str) -> None:
    served.answers("In time.")
    data = await served.post(path, {**BODIES[path], "timeout": 600})
    assert data["choices"][0]["finish_reason"] == "stop" and served.engine.aborted == []


def expected_prompt_logprobs(served: Any, ids: list[int], count: int) -> list[Any]:
    def entry(token_id: int) -> dict[str, Any]:
        tokens = [*((top, top + 1) for top in range(count)), (token_id, token_id + 1)]
        return {
            str(one): {"logprob": fake_logprob(one), "rank": rank, "decoded_token": served.tokenizer.token_text(one)}
            for one, rank in tokens
        }

    return [None, *(entry(token_id) for token_id in ids[1:])]


@pytest.mark.parametrize("count", [0, 2])
async def test_prompt_logprobs(served: Any, count: int) -> None:
    ids = [300, 301, 302]
    data = await served.complete(prompt=[ids, [303, 304]], prompt_logprobs=count)
    assert data["choices"][0]["prompt_logprobs"] == expected_prompt_logprobs(served, ids, count)
    assert data["choices"][1]["prompt_logprobs"] == expected_prompt_logprobs(served, [303, 304], count)
    served.engine.received.clear()
    data = await served.chat(prompt_logprobs=count, n=2)
    first, second = served.engine.requests
    assert data["prompt_logprobs"] == expected_prompt_logprobs(served, first.prompt_ids, count)
    assert (first.params.prompt_logprobs, second.params.prompt_logprobs) == (count, None)


async def test_prompt_logprobs_alone_generate_nothing(served: Any) -> None:
    data = await served.complete(prompt=[300, 301], prompt_logprobs=1, max_tokens=0)
    assert data["choices"][0]["text"] == "" and data["usage"]["completion_tokens"] == 0
    assert data["choices"][0]["prompt_logprobs"] == expected_prompt_logprobs(served, [300, 301], 1)


async def test_counts_of_logprobs_are_each_field_s_own(served: Any) -> None:
    data = await served.complete(prompt=[300, 301], prompt_logprobs=3, logprobs=1, echo=True, max_tokens=1)
    (choice,) = data["choices"]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 2, 2]
    assert len(choice["prompt_logprobs"][1]) == 4


@BOTH
async def test_prompt_logprobs_have_no_place_in_a_stream(served: Any, path: str) -> None:
    error = await served.refused(path, {**BODIES[path], "prompt_logprobs": 1, "stream": True})
    assert error["param"] == "prompt_logprobs"


async def test_max_new_tokens_of_the_checkpoint_is_the_default_of_chats(serve: Serve) -> None:
    served = await serve(default_sampling={"max_tokens": 9})
    await served.chat()
    await served.chat(max_tokens=3)
    await served.post(COMPLETIONS, {"prompt": "Hello"})
    assert [request.params.max_tokens for request in served.engine.requests] == [9, 3, 16]


@pytest.mark.parametrize(
    ("roles", "rendered"),
    [
        (["system", "developer", "user"], ["system 0\n\n1", "user 2"]),
        (["developer", "developer", "system"], ["system 0\n\n1\n\n2"]),
        (["system", "user", "system", "user"], ["system 0", "user 1", "system 2", "user 3"]),
    ],
)
async def test_leading_system_messages_become_one(served: Any, roles: list[str], rendered: list[str]) -> None:
    """A32."""
    await served.chat(messages=[{"role": role, "content": str(index)} for index, role in enumerate(roles)])
    text = served.tokenizer.decode(served.engine.requests[0].prompt_ids)
    turns = [turn.replace("\n", " ", 1).removesuffix("\n") for turn in text.split("<|im_start|>")[1:-1]]
    assert [turn.removesuffix("<|im_end|>") for turn in turns] == rendered
