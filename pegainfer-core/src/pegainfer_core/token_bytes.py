"""Bytes of single tokens, from what a tokenizer.json says about decoding.

Owns the two decoders of today's models: byte-level BPE, and SentencePiece-like pieces with byte fallback. Anything else has no
per-token bytes (`token_bytes_of` returns None) and is decoded by the library. Knows nothing of requests or streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend


class TokenBytes:
    """Token id to its exact bytes. Filled on use, so a large vocabulary costs nothing at start."""

    def __init__(self, backend: Backend, convert: Callable[[str], bytes], leading_spaces: int) -> None:
        """`leading_spaces` are taken off the front of a whole text (SentencePiece puts one before the first word)."""
        self.leading_spaces = leading_spaces
        self._id_to_token: Callable[[int], str | None] = backend.id_to_token
        self._convert = convert
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id without one."""
        known = self._known.get(token_id)
        if known is None:
            # the library takes 32-bit ids only
            token = self._id_to_token(token_id) if 0 <= token_id < 2**32 else None
            known = b"" if token is None else self._convert(token)
            self._known[token_id] = known
        return known

    def join(self, token_ids: Sequence[int]) -> bytes:
        """Bytes of a run of tokens."""
        return b"".join([self[token_id] for token_id in token_ids])


def token_bytes_of(backend: Backend) -> TokenBytes | None:
    """The table of a tokenizer, or None if its decoder does more than map each token to bytes."""
    if backend.decoder is None:
        return None
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenBytes(backend, _byte_level, 0)
    pieces = _Pieces()
    if not all(pieces.add(step) for step in steps):
        return None
    return TokenBytes(backend, pieces.convert, pieces.leading_spaces)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder as a flat list of elementary ones."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""Character of a byte-level vocabulary to its byte."""


def _byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet (an added one, with spaces or the like) stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


class _Pieces:
    """The steps of a SentencePiece-like decoder, where each acts on single tokens or on the front of the text."""

    def __init__(self) -> None:
        self.leading_spaces = 0
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False

    def add(self, step: dict[str, Any]) -> bool:
        """Take one more step; False if it is of no kind that fits."""
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.leading_spaces += step["start"]
        else:
            return bool(kind == "Fuse")
        return True

    def convert(self, token: str) -> bytes:
        """Bytes of one token, `<0xE2>` being a single one."""
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()
