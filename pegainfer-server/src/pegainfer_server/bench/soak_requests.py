"""Requests of a soak: valid ones of many kinds, invalid ones of many kinds, and valid ones that will be dropped.

Owns what is asked, drawn from a seed. Knows nothing of connections or of what comes back. Fields are those of the OpenAI API and
vLLM's names for further sampling.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal["valid", "invalid", "dropped"]
KINDS: tuple[Kind, ...] = ("valid", "invalid", "dropped")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FEATURES = ("chat", "several choices", "logprobs", "json_object")
"""What not every server has; used if a probe of it is answered."""
WORDS = [
    *("the", "sea", "is", "calm", "and", "a", "small", "boat", "waits", "for", "wind", "don't", "12345", "3.14"),
    *("\u00e9t\u00e9", "\u4f60\u597d", "\U0001f600", "\u0928\u092e\u0938\u094d\u0924\u0947"),
    *("def f(x):", "<b>x</b>", "<|im_end|>", "{'a': 1}", "\n", "\t", "  "),
]
"""Of texts: several scripts, code, markup, a control marker and white space."""
LONGEST_BODY = 20_000
"""Tokens of the prompt that is too long; with a longer context that case is left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request and what it is."""

    kind: Kind
    name: str
    """Of its kind of invalidity, or its route."""
    path: str
    body: bytes
    choices: int = 0
    """That a whole answer has; 0 where none is expected."""
    stream: bool = False


class RequestMix:
    """An endless supply of requests. `weights` are those of valid, invalid and dropped ones."""

    def __init__(
        self,
        model: str,
        token_ids: range,
        *,
        weights: Sequence[float],
        max_input: int,
        max_output: int,
        max_model_len: int | None,
        seed: int,
    ) -> None:
        self.features: set[str] = set()
        self._model = model
        self._token_ids = token_ids
        self._weights = weights
        self._max_input = max_input
        self._max_output = max_output
        self._max_model_len = max_model_len
        self._rng = random.Random(seed)
        self._shared = [self._rng.choice(token_ids) for _ in range(max_input)]

    def next(self) -> SoakRequest:
        """The next request."""
        (kind,) = self._rng.choices(KINDS, self._weights)
        return self._invalid() if kind == "invalid" else self._valid(kind)

    def probe(self, feature: str) -> SoakRequest:
        """A small request that needs one of FEATURES."""
        changes: dict[str, dict[str, Any]] = {
            "several choices": {"n": 2},
            "logprobs": {"logprobs": 2},
            "json_object": {"response_format": {"type": "json_object"}},
        }
        if feature == "chat":
            body = self._base() | {"messages": [{"role": "user", "content": "Hello"}]}
            return SoakRequest("valid", feature, CHAT, msgspec.json.encode(body), 1)
        body = self._base() | {"prompt": self._shared[:2], **changes[feature]}
        return SoakRequest("valid", feature, COMPLETIONS, msgspec.json.encode(body), 1)

    def _base(self) -> dict[str, Any]:
        return {"model": self._model, "max_tokens": 4}

    def _valid(self, kind: Kind) -> SoakRequest:
        rng = self._rng
        body = self._base() | {"max_tokens": rng.randint(1, self._max_output)} | self._sampling()
        prompts = 1
        if "chat" in self.features and rng.random() < 0.5:
            path = CHAT
            body["messages"] = self._messages()
            if "logprobs" in self.features and rng.random() < 0.2:
                body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
        else:
            path = COMPLETIONS
            prompts = rng.choice((1, 1, 1, 2))
            body["prompt"] = self._text() if rng.random() < 0.3 else [self._ids() for _ in range(prompts)]
            prompts = 1 if isinstance(body["prompt"], str) else prompts
            if "logprobs" in self.features and rng.random() < 0.2:
                body["logprobs"] = rng.randint(0, 5)
        if "json_object" in self.features and rng.random() < 0.1:
            body["response_format"] = {"type": "json_object"}
        if "several choices" in self.features and rng.random() < 0.2:
            body["n"] = rng.randint(2, 3)
        stream = rng.random() < 0.6
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return SoakRequest(kind, path, path, msgspec.json.encode(body), prompts * body.get("n", 1), stream)

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        options: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: {"temperature": rng.choice((0, 0.7, 1.3))},
            lambda: {"top_p": rng.uniform(0.5, 1)},
            lambda: {"top_k": rng.choice((-1, 1, 20, 10**6))},
            lambda: {"min_p": rng.uniform(0, 0.2)},
            lambda: {"seed": rng.randint(0, 2**31)},
            lambda: {"presence_penalty": rng.uniform(-2, 2)},
            lambda: {"frequency_penalty": rng.uniform(-2, 2)},
            lambda: {"repetition_penalty": rng.uniform(0.8, 1.5)},
            lambda: {"logit_bias": {str(rng.choice(self._token_ids)): rng.choice((-100, 5, 100))}},
            lambda: {"stop": rng.choice(("e", "\n\n", ["the", "\u4f60"]))},
            lambda: {"ignore_eos": True},
        )
        chosen: dict[str, Any] = {}
        for option in rng.sample(options, rng.randint(0, 4)):
            chosen |= option()
        return chosen

    def _ids(self) -> list[int]:
        """A prompt that may begin like others."""
        rng = self._rng
        shared = self._shared[: rng.choice((0, 0, self._max_input // 4, self._max_input // 2))]
        own = [rng.choice(self._token_ids) for _ in range(rng.randint(1, self._max_input - len(shared)))]
        return shared + own

    def _text(self) -> str:
        return (
            " ".join(self._rng.choice(WORDS) for _ in range(self._rng.randint(1, max(1, self._max_input // 16)))) + "."
        )

    def _messages(self) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self._text()}] if self._rng.random() < 0.3 else []
        for _ in range(self._rng.randint(0, 2)):
            messages += [{"role": "user", "content": self._text()}, {"role": "assistant", "content": self._text()}]
        return [*messages, {"role": "user", "content": self._text()}]

    def _invalid(self) -> SoakRequest:
        rng = self._rng
        prompt: dict[str, Any] = {"prompt": self._shared[:4]}
        fields: list[dict[str, Any]] = [
            {"prompt": ""},
            {"prompt": []},
            {"prompt": [10**9]},
            {"prompt": [-1]},
            {"prompt": None},
            {"model": "no-such-model", **prompt},
            {"temperature": "hot", **prompt},
            {"temperature": -1, **prompt},
            {"top_p": -1, **prompt},
            {"n": 10**6, **prompt},
            {"max_tokens": -1, **prompt},
            {"logprobs": 10**9, **prompt},
            {"stop": ["x"] * 10**4, **prompt},
            {"logit_bias": {"99999999": 5}, **prompt},
            {"logit_bias": {"x": 1}, **prompt},
            {"stream_options": {"include_usage": True}, **prompt},
            {"no_such_field": 1, **prompt},
            {"response_format": {"type": "no_such_type"}, **prompt},
        ]
        if self._max_model_len is not None and self._max_model_len < LONGEST_BODY:
            fields.append({"prompt": [self._token_ids.start] * (self._max_model_len + 1)})
        whole: list[tuple[str, str, bytes]] = [
            ("broken JSON", COMPLETIONS, b'{"prompt": "a'),
            ("no JSON", COMPLETIONS, b"\x00\xff"),
            ("not a number", COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
            ("a list", CHAT, b"[]"),
            ("deep nesting", CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
            ("no messages", CHAT, msgspec.json.encode({**self._base(), "messages": []})),
            ("no role", CHAT, msgspec.json.encode({**self._base(), "messages": [{"content": "a"}]})),
            ("messages are text", CHAT, msgspec.json.encode({**self._base(), "messages": "a"})),
            ("no route", "/v1/no/such/route", b"{}"),
        ]
        pick = rng.randrange(len(fields) + len(whole))
        if pick >= len(fields):
            return SoakRequest("invalid", *whole[pick - len(fields)])
        changed = fields[pick]
        name = next(name for name in changed if name != "prompt" or len(changed) == 1)
        return SoakRequest("invalid", name, COMPLETIONS, msgspec.json.encode(self._base() | changed))
