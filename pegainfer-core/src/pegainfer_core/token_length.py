"""How many characters one token can stand for, where a tokenizer's parts allow a proof.

Owns that one number, by which a text is known to have too many tokens before anything is tokenized. Knows nothing of requests. A part
that can drop text, or make any amount of it one token, gives None.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pegainfer_core.token_bytes import BYTE_ALPHABET

COMPOSED = 4
"""Characters that composition (NFC, NFKC) makes one of, at most: no character's canonical decomposition is longer."""

_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_COMPOSING = frozenset({"NFC", "NFKC"})
_GROWING = frozenset({"NFD", "NFKD", "Prepend"})


class TokenLength:
    """The longest token, and what normalization can do to a text before tokens are cut from it."""

    def __init__(self, backend: Backend, vocabulary: Mapping[str, int]) -> None:
        """`vocabulary` is the backend's, added tokens included."""
        normalizers, pre_tokenizers = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        self._composing = next((part["type"] for part in normalizers if part["type"] in _COMPOSING), None)
        self._longest: int | None = max(map(len, vocabulary), default=0)
        keeps_text = (
            all(map(_never_shrinks, normalizers))
            and all(map(_drops_nothing, pre_tokenizers))
            and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        )
        byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
        if not keeps_text or not _one_token_at_least(backend.model, byte_level, vocabulary):
            self._longest = None

    def most_characters(self, text: str, num_tokens: int) -> int | None:
        """Characters that `num_tokens` tokens can hold of a text of this kind; None if that is not known."""
        if self._longest is None:
            return None
        composed = self._composing is not None and not unicodedata.is_normalized(self._composing, text)
        return num_tokens * self._longest * (COMPOSED if composed else 1)


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list of elementary ones."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [step for each in inner for step in _flat(each)]


def _never_shrinks(normalizer: dict[str, Any]) -> bool:
    """But for composition, which is counted."""
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and len(old) <= len(normalizer["content"])
    return normalizer["type"] in _COMPOSING | _GROWING


def _drops_nothing(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS


def _one_token_at_least(model: Any, byte_level: bool, vocabulary: Mapping[str, int]) -> bool:
    """Whether every character becomes part of a token no longer than the vocabulary's longest."""
    if not isinstance(model, BPE):
        return False
    if byte_level:
        return all(char in vocabulary for char in BYTE_ALPHABET)
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(0x100))
