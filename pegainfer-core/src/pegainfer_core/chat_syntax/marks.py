"""Marks of a syntax, such as <think>: special tokens where the tokenizer has them as such, else plain text.

Owns how special tokens stand in the text that machines read: as one character that no decoded text can hold (a lone surrogate), so
that a model or a user who spells out the mark never makes one. Knows no particular syntax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

_FIRST, _LAST = 0xD800, 0xDFFF


class Vocabulary(Protocol):
    """What is needed of `pegainfer_core.tokenizer.Tokenizer`."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`, if it is one token."""


class Marks:
    """The marks of one format over one tokenizer. Call it with a mark as it is written to get it as it is read."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._characters: dict[str, str] = {}
        self._by_id: dict[int, str] = {}

    def __call__(self, written: str) -> str:
        """The mark in the text that machines read: itself, or one character where it is a special token."""
        token_id = self._vocabulary.token_id(written)
        if token_id is None or token_id not in self._vocabulary.special_ids:
            return written
        if written not in self._characters:
            character = chr(_FIRST + len(self._characters))
            self._characters[written] = self._by_id[token_id] = character
        return self._characters[written]

    def token_id(self, written: str) -> int | None:
        """The id of a mark, special or not, if it is one token."""
        return self._vocabulary.token_id(written)

    @property
    def by_id(self) -> Mapping[int, str]:
        """Special token id to the character that stands for it: for the detokenizer."""
        return self._by_id

    def is_special(self, written: str) -> bool:
        """Whether the mark is recognised by its id alone."""
        return self(written) != written

    def cleaner(self, *, show: bool) -> Cleaner:
        """For text on its way to the client: what stands for a special token is left out, or written out with `show`."""
        return Cleaner({character: written if show else "" for written, character in self._characters.items()})


class Cleaner:
    """Removes the characters that stand for special tokens."""

    def __init__(self, replacements: Mapping[str, str]) -> None:
        self._table = {ord(character): text for character, text in replacements.items()}

    def __call__(self, text: str) -> str:
        """The text for the client."""
        if text.isascii() or not any(_FIRST <= ord(character) <= _LAST for character in text):
            return text
        return text.translate(self._table)
