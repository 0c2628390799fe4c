"""POST /v1/completions: prompts, choices, echo, logprobs, stops, usage."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pegainfer_core.messages import TokenLogprob
from pegainfer_core.testing.fake_client import fake_logprob

Serve = Callable[..., Awaitable[Any]]
TEXT = "The capital of France is Paris."


async def test_shape_of_an_answer(served: Any) -> None:
    served.answers(TEXT)
    data = await served.complete()
    assert set(data) == {"id", "object", "created", "model", "choices", "usage"}
    assert data["id"].startswith("cmpl-") and data["object"] == "text_completion" and data["model"] == "tiny"
    (choice,) = data["choices"]
    assert choice == {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    generated = len(served.tokenizer.encode(TEXT)) + 1  # EOS counts
    prompt = len(served.tokenizer.encode("Hello"))
    assert data["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_default_max_tokens_is_16(served: Any) -> None:
    await served.post("/v1/completions", {"prompt": "Hello"})
    assert served.engine.requests[0].params.max_tokens == 16


async def test_max_tokens_is_cut_to_the_room_left(serve: Serve) -> None:
    """A23: clamped, and the finish reason is length."""
    served = await serve(max_model_len=20)
    served.engine.script = lambda _: [50] * 100
    data = await served.complete(prompt=[40] * 15, max_tokens=65535)
    assert served.engine.requests[0].params.max_tokens == 5
    assert data["choices"][0]["finish_reason"] == "length"
    assert data["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("name", ["tiny", "alias"])
async def test_answers_carry_the_name_that_was_asked_for(served: Any, name: str) -> None:
    assert (await served.complete(model=name))["model"] == name


async def test_prompt_forms(served: Any) -> None:
    """A56."""
    ids = served.tokenizer.encode("Hello")
    for prompt, sent in [("Hello", [ids]), (["Hello", "a"], [ids, served.tokenizer.encode("a")]), (ids, [ids])]:
        served.engine.received.clear()
        await served.complete(prompt=prompt)
        assert [request.prompt_ids for request in served.engine.requests] == sent
    served.engine.received.clear()
    data = await served.complete(prompt=[[300, 301], [302]], n=2)
    assert [request.prompt_ids for request in served.engine.requests] == [[300, 301], [300, 301], [302], [302]]
    assert [choice["index"] for choice in data["choices"]] == [0, 1, 2, 3]
    assert data["usage"]["prompt_tokens"] == 3
    expected = [served.tokenizer.decode(ids) for ids in ([300, 301], [300, 301], [302], [302])]
    assert [choice["text"] for choice in data["choices"]] == expected


async def test_long_prompts_are_tokenized_all_the_same(serve: Serve) -> None:
    served = await serve(max_model_len=100_000)
    await served.complete(prompt="word " * 4000, max_tokens=1)
    assert served.engine.requests[0].prompt_ids == served.tokenizer.encode("word " * 4000)


async def test_choices_of_a_seeded_request_have_seeds_of_their_own(served: Any) -> None:
    await served.complete(n=3, seed=2**63 - 2)
    assert [request.params.seed for request in served.engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    ids = [request.request_id for request in served.engine.requests]
    assert len(set(ids)) == 3


async def test_every_sampling_field_reaches_the_engine(served: Any) -> None:
    """A51."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "seed": 3,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    await served.complete(
        **fields, logit_bias={"5": -100, "6": 1.5}, stop_token_ids=[9], cache_salt="s", priority=-2, max_tokens=9
    )
    (request,) = served.engine.requests
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.params.logit_bias == {5: -100.0, 6: 1.5}
    assert request.params.stop_token_ids == (9,)
    assert (request.params.max_tokens, request.cache_salt, request.priority) == (9, "s", -2)


async def test_max_completion_tokens_wins(served: Any) -> None:
    await served.complete(max_tokens=5, max_completion_tokens=3)
    assert served.engine.requests[0].params.max_tokens == 3


async def test_top_k_beyond_the_vocabulary_means_all_of_it(served: Any) -> None:
    await served.complete(top_k=10**18)
    assert served.engine.requests[0].params.top_k == served.tokenizer.vocab_size


async def test_defaults_of_the_checkpoint_give_way_to_explicit_values(serve: Serve) -> None:
    """D11."""
    served = await serve(default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    await served.complete()
    await served.complete(temperature=0, top_k=0, top_p=1.0)
    await served.complete(temperature=None)
    used = [(r.params.temperature, r.params.top_k, r.params.top_p) for r in served.engine.requests]
    assert used == [(0.6, 20, 0.95), (0.0, 0, 1.0), (0.6, 20, 0.95)]


async def test_null_is_the_same_as_absent(served: Any) -> None:
    data = await served.complete(stop=None, suffix=None, logit_bias=None, n=None, logprobs=None, seed=None)
    assert len(data["choices"]) == 1


async def test_no_op_values_of_unsupported_features_are_accepted(served: Any) -> None:
    await served.complete(n=2, best_of=2, response_format={"type": "text"})


# stops


async def test_stop_string_over_tokens_aborts_in_the_engine(served: Any) -> None:
    served.answers("one two three four")
    data = await served.complete(stop="o th")
    (choice,) = data["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one tw", "stop", "o th")
    assert served.engine.aborted == [served.engine.requests[0].request_id]
    assert served.engine.open_ids == [] and served.engine.num_open == 0


async def test_stop_string_may_be_included(served: Any) -> None:
    served.answers("one two three")
    data = await served.complete(stop=["zzz", "two"], include_stop_str_in_output=True)
    assert data["choices"][0]["text"] == "one two"


async def test_stop_token_id_is_reported_and_eos_is_not(served: Any) -> None:
    """A8."""
    served.engine.script = lambda _: [300, 301, 302]
    data = await served.complete(stop_token_ids=[302], ignore_eos=True)
    (choice,) = data["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        served.tokenizer.decode([300, 301]),
        "stop",
        302,
    )
    assert data["usage"]["completion_tokens"] == 3


async def test_special_tokens_are_skipped_unless_asked_for(served: Any) -> None:
    served.engine.script = lambda _: [300, 1, 301]
    assert (await served.complete())["choices"][0]["text"] == served.tokenizer.decode([300, 301])
    kept = await served.complete(skip_special_tokens=False)
    assert kept["choices"][0]["text"] == served.tokenizer.decode([300, 1, 301])


# logprobs and echo


def entry(served: Any, ids: list[int], index: int, count: int) -> dict[str, float]:
    tokens = [*range(count), ids[index]]
    return {served.tokenizer.token_text(token_id): fake_logprob(token_id) for token_id in tokens}


@pytest.mark.parametrize("count", [0, 2])
async def test_logprobs_in_parallel_lists(served: Any, count: int) -> None:
    ids = [300, 301, 302]
    served.engine.script = lambda _: ids
    data = await served.complete(logprobs=count)
    logprobs = data["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [served.tokenizer.token_text(token_id) for token_id in ids]
    assert logprobs["token_logprobs"] == [fake_logprob(token_id) for token_id in ids]
    assert logprobs["top_logprobs"] == [entry(served, ids, i, count) for i in range(3)]
    lengths = [len(served.tokenizer.decode(ids[:i])) for i in range(3)]
    assert logprobs["text_offset"] == lengths


async def test_broken_tokens_and_token_ids_in_logprobs(served: Any) -> None:
    ids = served.tokenizer.encode("\U0001f389")
    served.engine.script = lambda _: ids
    data = await served.complete(logprobs=0)
    assert data["choices"][0]["text"] == "\U0001f389"
    assert data["choices"][0]["logprobs"]["tokens"] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x8e", r"bytes:\x89"]
    data = await served.complete(logprobs=0, return_tokens_as_token_ids=True)
    assert data["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]


async def test_logprobs_that_json_cannot_carry_become_the_floor(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """D10."""
    broken = TokenLogprob(300, -math.inf, 1, [(301, math.nan), (302, -1e30)])
    monkeypatch.setattr("pegainfer_core.testing.fake_client._logprobs", lambda *_: broken)
    data = await served.complete(logprobs=2, max_tokens=1)
    logprobs = data["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}


async def test_echo_without_logprobs(served: Any) -> None:
    served.answers(TEXT)
    data = await served.complete(prompt=["Hello ", "<|im_start|>x"], echo=True)
    assert [choice["text"] for choice in data["choices"]] == [f"Hello {TEXT}", f"<|im_start|>x{TEXT}"]
    assert served.engine.requests[0].params.prompt_logprobs is None


async def test_echo_alone_needs_no_engine(served: Any) -> None:
    data = await served.complete(echo=True, max_tokens=0)
    assert data["choices"][0]["text"] == "Hello" and data["choices"][0]["finish_reason"] == "length"
    assert data["usage"]["completion_tokens"] == 0
    assert served.engine.received == []


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("as_ids", [True, False])
async def test_echo_with_logprobs_gives_the_whole_prompt(served: Any, max_tokens: int, as_ids: bool) -> None:
    """A21."""
    text = "The capital \U0001f389"
    prompt = served.tokenizer.encode(text)
    served.engine.script = lambda _: [300, 301, 302]
    data = await served.complete(prompt=prompt if as_ids else text, echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = data["choices"]
    ids = prompt + [300, 301][:max_tokens]
    assert choice["text"] == served.tokenizer.decode(ids)
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(ids)}
    assert logprobs["token_logprobs"] == [None, *(fake_logprob(token_id) for token_id in ids[1:])]
    assert logprobs["top_logprobs"][0] is None
    for index in range(1, len(ids)):
        assert list(logprobs["top_logprobs"][index]) == ["<|endoftext|>", logprobs["tokens"][index]]
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    pieces = [choice["text"][begin:end] for begin, end in zip(logprobs["text_offset"], ends, strict=True)]
    whole = [p for p, t in zip(pieces, logprobs["tokens"], strict=True) if not t.startswith("bytes:")]
    assert whole == [t for t in logprobs["tokens"] if not t.startswith("bytes:")]
    assert "".join(pieces) == choice["text"]


async def test_echo_offsets_of_ids_with_special_tokens(served: Any) -> None:
    prompt = [1, *served.tokenizer.encode("Hello"), 2]
    data = await served.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    (choice,) = data["choices"]
    assert choice["text"] == "Hello"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == offsets[1] == 0 and offsets[-1] == 5
    kept = await served.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0, skip_special_tokens=False)
    assert kept["choices"][0]["text"] == "<|im_start|>Hello<|im_end|>"


async def test_token_ids_on_request(served: Any) -> None:
    served.engine.script = lambda _: [300, 301]
    data = await served.complete(prompt=[305, 306], return_token_ids=True)
    (choice,) = data["choices"]
    assert choice["token_ids"] == [300, 301] and choice["prompt_token_ids"] == [305, 306]


async def test_cached_tokens_are_reported(served: Any) -> None:
    """A53."""
    data = await served.complete(prompt=[300] * 20, n=2)
    assert data["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
