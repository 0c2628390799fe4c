"""Every request field that the engine carries out, seen to have its effect on a real server with a tiny random model (A51)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pegainfer_core.testing.served import served
from pegainfer_core.testing.tiny_tokenizer import EOS_ID
from pegainfer_core.tokenizer import Tokenizer, load_tokenizer
from pegainfer_qwen3.testing import write_tiny_qwen3

PROMPT = [5, 6, 7]
LONG = 40  # tokens, more than two pages


class Api:
    """One server, spoken to."""

    def __init__(self, url: str, http: httpx.Client, tokenizer: Tokenizer) -> None:
        self.url = url
        self.tokenizer = tokenizer
        self._http = http

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of an answer that must succeed."""
        response = self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **fields: Any) -> Any:
        """A greedy completion of 8 tokens, unless the fields say otherwise."""
        usual = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post("/v1/completions", usual | fields)

    def ids(self, **fields: Any) -> list[int]:
        """Token ids of the only choice."""
        (choice,) = self.complete(**fields)["choices"]
        ids: list[int] = choice["token_ids"]
        return ids

    def gauge(self, name: str) -> float:
        """A value of /metrics."""
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    path: Path = write_tiny_qwen3(tmp_path_factory.mktemp("model"))
    with (
        served(path, "--max-running-requests", "1") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield Api(server.url, http, load_tokenizer(path))


def test_temperature_and_seed(api: Api) -> None:
    greedy = api.ids()
    assert api.ids(seed=1) == greedy
    drawn = [api.ids(temperature=1, seed=seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert api.ids(temperature=1e-9, seed=5) == greedy
    unseeded = {tuple(api.ids(temperature=1)) for _ in range(3)}
    assert len(unseeded) > 1


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_that_keep_one_token_are_greedy(api: Api, fields: dict[str, Any]) -> None:
    assert api.ids(temperature=5, seed=3, **fields) == api.ids()


@pytest.mark.parametrize("bias", [-100, 100])
def test_logit_bias_forbids_and_forces(api: Api, bias: int) -> None:
    """D15."""
    usual = api.ids()[0]
    other = next(token_id for token_id in range(300, 400) if token_id != usual)
    if bias > 0:
        assert api.ids(logit_bias={str(other): bias}) == [other] * 8
    else:
        assert usual not in api.ids(logit_bias={str(usual): bias})


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_end_repetition(api: Api, field: str) -> None:
    likely = {
        "logit_bias": {str(token_id): 10 for token_id in range(300, 308)}
    }  # ahead of all others, by about as much
    assert len(set(api.ids(**likely))) < len(set(api.ids(**likely, **{field: 2.0})))


def test_eos_min_tokens_and_ignore_eos(api: Api) -> None:
    """A8, A9, A10."""
    to_eos = {"logit_bias": {str(EOS_ID): 100}, "ignore_eos": False}
    ended = api.complete(**to_eos)
    assert (ended["choices"][0]["finish_reason"], ended["choices"][0]["stop_reason"]) == ("stop", None)
    assert ended["choices"][0]["token_ids"] == [] and ended["usage"]["completion_tokens"] == 1
    later = api.complete(**to_eos, min_tokens=4)
    assert len(later["choices"][0]["token_ids"]) == 4 and later["usage"]["completion_tokens"] == 5
    never = api.complete(**{**to_eos, "ignore_eos": True})
    assert never["choices"][0]["finish_reason"] == "length" and never["choices"][0]["token_ids"] == [EOS_ID] * 8


def test_stop_token_ids_whatever_ignore_eos_says(api: Api) -> None:
    """A8."""
    third = api.ids()[2]
    first_place = api.ids().index(third)
    for ignore_eos in (True, False):
        (choice,) = api.complete(stop_token_ids=[third], ignore_eos=ignore_eos)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
        assert len(choice["token_ids"]) == first_place


def test_stop_strings(api: Api) -> None:
    """A3, A8: excluded unless asked for, and the reason is the string."""
    text = api.complete()["choices"][0]["text"]
    stop = text[3:6]
    place = text.index(stop)
    (choice,) = api.complete(stop=stop)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:place], "stop", stop)
    (choice,) = api.complete(stop=["zzzz", stop], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == text[: place + len(stop)]


def test_skip_special_tokens(api: Api) -> None:
    """B15: the text of EOS is shown to those who ask for it only."""
    forced = {"logit_bias": {str(EOS_ID): 100}, "max_tokens": 2}
    assert api.complete(**forced)["choices"][0]["text"] == ""
    shown = api.complete(**forced, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == api.tokenizer.decode([EOS_ID] * 2) != ""


def test_choices_are_those_of_seeds_that_follow_each_other(api: Api) -> None:
    """A56."""
    fields: dict[str, Any] = {"temperature": 1, "prompt": [[5, 6, 7], [8, 9]]}
    data = api.complete(**fields, n=3, best_of=3, seed=10)
    assert [choice["index"] for choice in data["choices"]] == list(range(6))
    assert data["usage"]["prompt_tokens"] == 5
    for k in range(3):
        alone = api.complete(**fields, seed=10 + k)["choices"]
        assert [alone[0]["token_ids"], alone[1]["token_ids"]] == [
            data["choices"][k]["token_ids"],
            data["choices"][3 + k]["token_ids"],
        ]


def test_logprobs_of_output_and_of_prompt_are_the_same_numbers(api: Api) -> None:
    """A21: generated, echoed and asked for as prompt_logprobs; cold and warm."""
    generated = api.complete(logprobs=2)["choices"][0]
    whole = PROMPT + generated["token_ids"]
    for _ in range(2):
        echoed = api.complete(prompt=whole, echo=True, logprobs=2, max_tokens=1)["choices"][0]["logprobs"]
        assert echoed["token_logprobs"][0] is None and len(echoed["token_logprobs"]) == len(whole) + 1
        assert echoed["token_logprobs"][3:-1] == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-4)
        scored = api.complete(prompt=whole, prompt_logprobs=2, max_tokens=0)["choices"][0]["prompt_logprobs"]
        values = [entry[str(token_id)]["logprob"] for entry, token_id in zip(scored[1:], whole[1:], strict=True)]
        assert values == pytest.approx(echoed["token_logprobs"][1:-1], abs=1e-4)
        assert all(entry[str(token_id)]["rank"] == 1 for entry, token_id in zip(scored[3:], whole[3:], strict=True))


def test_cache_salt_parts_the_prefix_cache(api: Api) -> None:
    """A53: equal prompts share whole pages, and only with requests of the same salt."""
    prompt = [400 + index for index in range(LONG)]

    def cached(**fields: Any) -> int:
        count: int = api.complete(prompt=prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached(), cached()] == [0, 32]
    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 32, 0, 32]


def test_last_message_goes_on_and_the_generation_prompt_can_be_left_out(api: Api) -> None:
    """A50."""
    user, begun = {"role": "user", "content": "x"}, {"role": "assistant", "content": "The capital is"}

    def rendered(**body: Any) -> list[int]:
        ids: list[int] = api.post("/tokenize", body)["tokens"]
        return ids

    for body in (
        {"messages": [user, begun], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [user], "add_generation_prompt": False},
        {"messages": [user]},
    ):
        chat = api.post("/v1/chat/completions", {**body, "max_tokens": 8, "temperature": 0, "ignore_eos": True})
        prompt = rendered(**body)
        assert chat["usage"]["prompt_tokens"] == len(prompt)
        assert (
            chat["choices"][0]["message"]["content"].strip()
            == api.complete(prompt=prompt)["choices"][0]["text"].strip()
        )
    assert api.tokenizer.decode(rendered(messages=[user, begun], continue_final_message=True)).endswith("capital is")


def test_max_completion_tokens_comes_before_max_tokens(api: Api) -> None:
    assert len(api.ids(max_tokens=8, max_completion_tokens=3)) == 3


async def test_priority_decides_who_waits(api: Api) -> None:
    """Of two that wait, the later one runs first, because its priority says so; so does a service tier."""
    for low, high in (({"priority": 5}, {"priority": -5}), ({"service_tier": "flex"}, {"service_tier": "priority"})):
        assert await finishing_order(api, low, high) == ["high", "low"]


async def finishing_order(api: Api, low: dict[str, Any], high: dict[str, Any]) -> list[str]:
    order: list[str] = []
    async with httpx.AsyncClient(base_url=api.url, timeout=120) as http:

        async def run(name: str, fields: dict[str, Any]) -> None:
            response = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, **fields})
            assert response.status_code == 200, response.text
            order.append(name)

        async def until_waiting(count: int) -> None:
            while await asyncio.to_thread(api.gauge, "num_requests_waiting") != count:
                pass

        blocker = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=blocker) as response:
            lines = response.aiter_lines()
            await anext(lines)  # it holds the only place
            first = asyncio.create_task(run("low", low))
            await until_waiting(1)
            second = asyncio.create_task(run("high", high))
            await until_waiting(2)
        await asyncio.gather(first, second)
    return order


def test_timeout_frees_the_engine(api: Api) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "timeout": 0.2}
    response = httpx.post(f"{api.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 408 and response.json()["error"]["param"] == "timeout"
    assert api.gauge("num_requests_running") == 0 and api.gauge("kv_cache_usage_perc") == 0
    assert len(api.ids()) == 8
