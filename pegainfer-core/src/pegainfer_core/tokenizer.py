"""Text to ids and back, and back incrementally.

Owns the wrapper over `tokenizers` and the incremental detokenizer. Used by clients of the engine only; the engine never imports it. Imports
neither torch nor transformers when the checkpoint has a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Tokenizer:
    """A checkpoint's tokenizer. Thread-safe: encode and decode keep no state."""

    vocab_size: int
    """One more than the highest id that has a token: ids at or above it cannot be decoded."""
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in the text become their ids."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own (may hold U+FFFD)."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token."""
        raise NotImplementedError


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError naming the files looked for."""
    raise NotImplementedError


class Detokenizer:
    """Text of a growing list of ids, never ending inside a UTF-8 character. Joined pushes plus flush equal one full decode."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        raise NotImplementedError

    def push(self, token_ids: Sequence[int]) -> str:
        """New text; held back while its last character is incomplete."""
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back, at the end of the output (U+FFFD for a character that never completed)."""
        raise NotImplementedError
