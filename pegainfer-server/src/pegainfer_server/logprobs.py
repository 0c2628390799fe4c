"""Logprobs in the two shapes of the OpenAI API: completions' parallel lists and chat's list of entries.

Owns how a token is written and that no number JSON cannot carry gets out. Knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegainfer_core.messages import TokenLogprob
from pegainfer_core.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for minus infinity and NaN


def finite(logprob: float) -> float:
    """`logprob`, or FLOOR where JSON has no number for it."""
    return logprob if logprob > FLOOR else FLOOR  # a comparison with NaN is false


class TokenWriter:
    """Writes tokens as strings. A token that is not valid UTF-8 by itself is written "bytes:\\xe2\\x82", as the OpenAI API does."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """`as_ids` writes "token_id:N" instead, which no two tokens share."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token as a string."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        """One entry of chat's `logprobs.content`."""
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def prompt_entries(self, entries: Sequence[TokenLogprob | None], count: int) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`, as vLLM words them: for each token an object by token id of it and its `count` alternatives."""
        return [None if entry is None else self._by_id(entry, count) for entry in entries]

    def _by_id(self, entry: TokenLogprob, count: int) -> dict[str, Any]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:count], 1)]
        return {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokenizer.token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}

    def top(self, entry: TokenLogprob, count: int) -> dict[str, float]:
        """One entry of completions' `top_logprobs`: the `count` most likely tokens, and the sampled one if not among them."""
        result: dict[str, float] = {}
        for token_id, logprob in (*entry.top[:count], (entry.token_id, entry.logprob)):
            result.setdefault(self.text(token_id), finite(logprob))
        return result


class LegacyLogprobs:
    """Completions' shape: parallel lists that grow by token."""

    def __init__(self, writer: TokenWriter, count: int) -> None:
        """`count`: alternatives per token."""
        self._writer = writer
        self._count = count
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token_id: int, entry: TokenLogprob | None, offset: int) -> None:
        """Append a token; `entry` is None for the first prompt token, which nothing predicts."""
        self.tokens.append(self._writer.text(token_id))
        self.token_logprobs.append(None if entry is None else finite(entry.logprob))
        self.top_logprobs.append(None if entry is None else self._writer.top(entry, self._count))
        self.text_offset.append(offset)

    def as_json(self) -> dict[str, Any]:
        """The object of the response."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
