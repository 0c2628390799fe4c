"""/tokenize and /detokenize agree with what the generation routes send to the engine."""

from __future__ import annotations

from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "Hello \U0001f389"}]


async def test_prompt(served: Any) -> None:
    data = await served.post("/tokenize", {"prompt": "Hello world"})
    ids = served.tokenizer.encode("Hello world")
    assert data == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
    await served.complete(prompt="Hello world")
    assert served.engine.requests[0].prompt_ids == ids


async def test_messages(served: Any) -> None:
    for options in ({}, {"add_generation_prompt": False}):
        data = await served.post("/tokenize", {"messages": MESSAGES, **options})
        await served.chat(messages=MESSAGES, **options)
        assert data["tokens"] == served.engine.requests[-1].prompt_ids


async def test_token_strings(served: Any) -> None:
    data = await served.post("/tokenize", {"prompt": "Hello \U0001f389", "return_token_strs": True})
    assert len(data["token_strs"]) == data["count"]
    assert data["token_strs"][-1] == r"bytes:\x89"


@pytest.mark.parametrize("text", ["Hello world", "\u4f60\u597d \U0001f389\n", "<|im_start|>user"])
async def test_round_trip(served: Any, text: str) -> None:
    tokens = (await served.post("/tokenize", {"prompt": text}))["tokens"]
    assert await served.post("/detokenize", {"tokens": tokens}) == {"prompt": text}


async def test_nothing_detokenizes_to_nothing(served: Any) -> None:
    assert await served.post("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "foo": 1}, "foo"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
    ],
)
async def test_refusals(served: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert (await served.refused(path, body))["param"] == param
