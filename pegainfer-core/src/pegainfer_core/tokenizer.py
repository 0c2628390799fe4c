"""Text to ids and back, and back incrementally.

Owns the wrapper over `tokenizers` and the incremental detokenizer. Used by clients of the engine only; the engine never
imports it. Imports neither torch nor transformers when the checkpoint has a tokenizer.json.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pegainfer_core.checkpoint import read_json, refuse_lfs_pointer
from pegainfer_core.errors import CheckpointError, RequestError
from pegainfer_core.token_bytes import TokenBytes, token_bytes_of
from pegainfer_core.token_length import TokenLength

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
USUAL_CHARACTERS = 8
"""Characters per token that no ordinary text exceeds: twice what English has. Texts below it are tokenized without further questions."""
SLACK_TOKENS = 1024
"""More tokens than the end of a cut text can have too many."""
_OTHER_VOCABULARIES = ("tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json", "spiece.model", "tekken.json")


class Tokenizer:
    """A checkpoint's tokenizer. Thread-safe: encode and decode keep no state."""

    vocab_size: int
    """One more than the highest id that has a token: ids at or above it cannot be decoded."""
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out."""
    control_texts: frozenset[str]
    """Spellings that `encode` turns into one id wherever they stand. Single characters and white space are not among them."""
    special_tokens: Mapping[str, str]
    """Named tokens (bos_token, ...) and their text, as chat templates see them."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str] | None = None) -> None:
        """Wrap a tokenizer of the `tokenizers` library, which belongs to this object from now on."""
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        named = {name: backend.token_to_id(text) for name, text in self.special_tokens.items()}
        _make_special(backend, [token_id for token_id in named.values() if token_id is not None])
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_token_id = named.get("bos_token")
        self.eos_token_id = named.get("eos_token")
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_texts = frozenset(token.content for token in added.values() if len(token.content.strip()) > 1)
        self._backend = backend
        self._bytes = token_bytes_of(backend)
        self._length = TokenLength(backend, vocabulary)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in the text become their ids.

        `add_special_tokens` adds what tokenizer.json's own post-processor adds, as transformers 5 does (it ignores
        add_bos_token beside a tokenizer.json). Releases the GIL. Raises RequestError for text that is no Unicode.
        """
        try:
            # `encode` would hold the GIL; a batch does not, and without offsets it is the fastest
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error

    def check_length(self, text: str, max_tokens: int, param: str | None = None) -> None:
        """Raise RequestError for a text that certainly has more than `max_tokens` tokens, at a cost that `max_tokens` bounds.

        Nothing is tokenized where the number of characters says enough; else longer and longer beginnings are, until one alone has
        twice the tokens. A text that passes may still be too long, by less than that.
        """
        most = self._length.most_characters(text, max_tokens)
        length = min(len(text), USUAL_CHARACTERS * max_tokens + SLACK_TOKENS)
        too_long = most is not None and len(text) > most
        while not too_long and length < len(text):
            too_long = len(self.encode(text[:length], add_special_tokens=False)) > 2 * max_tokens + SLACK_TOKENS
            length *= 2
        if too_long:
            where = f"{param}: " if param else ""
            raise RequestError(
                f"{where}a text of {len(text)} characters does not fit this model's context of {max_tokens} tokens",
                "context_length_exceeded",
                param,
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 become U+FFFD, ids without a token become nothing.

        A run of byte tokens that is broken somewhere keeps the characters that are whole in it; `tokenizers` turns such
        a run of a byte-fallback tokenizer into U+FFFD altogether.
        """
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        if self._bytes is None:
            return self._backend.decode([i for i in ids if self.has_token(i)], skip_special_tokens=False)
        text = self._bytes.join(ids).decode("utf-8", "replace")
        return _without_leading_spaces(text, self._bytes.leading_spaces)[0]

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`; None if that takes several tokens."""
        return self._backend.token_to_id(text)

    def has_token(self, token_id: int) -> bool:
        """Whether an id stands for anything; there may be gaps below `vocab_size`."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own (may hold U+FFFD)."""
        if self._bytes is None:
            return self.decode([token_id])
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token; those of its text where the decoder is neither byte-level nor SentencePiece-like."""
        return self.token_text(token_id).encode() if self._bytes is None else self._bytes[token_id]

    @property
    def byte_table(self) -> TokenBytes | None:
        """Bytes per token; None if the decoder does not work token by token."""
        return self._bytes


def _make_special(backend: Backend, token_ids: Sequence[int]) -> None:
    """Named tokens are special whatever the files say, and then they are found in texts; flags besides stay as they are.

    A named token that the vocabulary lacks gets no id: the model has no row for it.
    """
    added = backend.get_added_tokens_decoder()
    news = []
    for token_id in token_ids:
        token = added.get(token_id)
        if token is None:
            news.append(AddedToken(backend.id_to_token(token_id) or "", special=True))
        elif not token.special:
            token.special = True
            news.append(token)
    if news:
        backend.add_special_tokens(news)


def _without_leading_spaces(text: str, most: int) -> tuple[str, int]:
    """The text without up to `most` spaces at its front, and how many may still go (none once other text came)."""
    if not most or not text:
        return text, most
    rest = text.lstrip(" ")
    taken = min(len(text) - len(rest), most)
    return text[taken:], (0 if rest else most - taken)


# loading


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError naming the files looked for."""
    config = _optional_json(path / "tokenizer_config.json")
    file = path / "tokenizer.json"
    if not file.exists():
        return Tokenizer(_from_transformers(path), read_special_tokens(path, config))
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        refuse_lfs_pointer(file)
        raise CheckpointError(f"{file} is no tokenizer of the tokenizers library: {error}") from error
    _add_declared_tokens(backend, config, path)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    return Tokenizer(backend, read_special_tokens(path, config))


def read_special_tokens(path: Path, config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Named special tokens and their text: tokenizer_config.json, and special_tokens_map.json where that still counts.

    As in transformers 5: the older file counts if tokenizer_config.json has no added_tokens_decoder, and then it wins;
    other keys in *_token with a string, and a dict of extra_special_tokens, name tokens of the model's own.
    """
    config = _optional_json(path / "tokenizer_config.json") if config is None else config
    named = {key: config.get(key) for key in _NAMED_TOKENS}
    named |= {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    sources = [config]
    if "added_tokens_decoder" not in config:
        older = _optional_json(path / "special_tokens_map.json")
        named |= {key: older[key] for key in _NAMED_TOKENS if key in older}
        sources.append(older)
    for source in sources:
        extra = source.get("extra_special_tokens")
        named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"{path}: {name} is {text!r} in the tokenizer's files; it must be a text")
    return {name: text for name, text in texts.items() if text is not None}


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _add_declared_tokens(backend: Backend, config: Mapping[str, Any], path: Path) -> None:
    """Tokens of tokenizer_config.json: its flags win over those of tokenizer.json, and it may declare further ones."""
    file = path / "tokenizer_config.json"
    try:
        declared = {
            int(key): AddedToken(**{name: value for name, value in fields.items() if name != "__type"})
            for key, fields in (config.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: added_tokens_decoder is malformed: {error}") from error
    known = backend.get_added_tokens_decoder()
    flags = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
    news = [
        token
        for token_id, token in sorted(declared.items(), key=lambda item: item[0])
        if token_id not in known or any(getattr(token, flag) != getattr(known[token_id], flag) for flag in flags)
    ]
    backend.add_tokens(news)  # one call: each rebuilds the matcher of all added tokens
    for token_id, token in declared.items():
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise CheckpointError(f"{file} gives {token.content!r} the id {token_id}, tokenizer.json gives it {found}")


def _from_transformers(path: Path) -> Backend:
    """The rare checkpoint without tokenizer.json: transformers converts what there is."""
    if not any(any(path.glob(pattern)) for pattern in _OTHER_VOCABULARIES):
        looked_for = ", ".join(("tokenizer.json", *_OTHER_VOCABULARIES))
        raise CheckpointError(f"{path} has no tokenizer; looked for {looked_for}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install 'pegainfer[transformers]'"
        raise CheckpointError(f"{path} has no tokenizer.json; to convert the tokenizer it has: {hint}") from error
    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a conversion may raise
        raise CheckpointError(f"{path} has no tokenizer.json, and transformers cannot convert it: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise CheckpointError(f"{path} has no tokenizer.json, and transformers has no fast tokenizer for it")
    return backend


# incremental


class Detokenizer:
    """Text of a growing list of ids, never ending inside a UTF-8 character. Joined pushes plus flush equal one decode.

    SentencePiece-like tokenizers put a space before the first word of a text, and decoding takes it off. Output that
    carries on a text (a completion after its prompt) must keep it: `continues=True`. For byte-level tokenizers, which
    add nothing, both are the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`marks`: text that special tokens become instead of their own, for a reader that must tell them from spelled-out ones."""
        self._marks = marks or {}
        self._skipped = (tokenizer.special_ids if skip_special_tokens else frozenset()) - self._marks.keys()
        table = tokenizer.byte_table
        self._text: _ByteText | _WindowText = (
            _WindowText(tokenizer) if table is None else _ByteText(table, 0 if continues else table.leading_spaces)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """New text; held back while its last character is incomplete."""
        skipped = self._skipped
        shown = [token_id for token_id in token_ids if token_id not in skipped]
        if not self._marks or self._marks.keys().isdisjoint(shown):
            return self._text.push(shown)
        return "".join(self._push_with_marks(shown))

    def _push_with_marks(self, token_ids: Sequence[int]) -> Iterator[str]:
        run: list[int] = []
        for token_id in token_ids:
            if token_id in self._marks:
                yield self._text.push(run)
                yield self._text.flush()
                yield self._marks[token_id]
                run = []
            else:
                run.append(token_id)
        yield self._text.push(run)

    def flush(self) -> str:
        """What was held back, at the end of the output (U+FFFD for a character that never completed)."""
        return self._text.flush()


class _ByteText:
    """Where every token has its bytes: an incremental UTF-8 decoder does the work."""

    def __init__(self, table: TokenBytes, leading_spaces: int) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = leading_spaces

    def push(self, token_ids: Sequence[int]) -> str:
        return self._stripped(self._decoder.decode(self._table.join(token_ids)))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if not self._leading_spaces:
            return text
        text, self._leading_spaces = _without_leading_spaces(text, self._leading_spaces)
        return text


class _WindowText:
    """Other decoders: decode a window of the last tokens, and emit by how much it grew.

    The window reaches back over `CONTEXT` tokens that were emitted, because such decoders treat the first token of a text
    in their own way.
    """

    CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0
        """How many of `_ids` have their text out."""

    def push(self, token_ids: Sequence[int]) -> str:
        # an id without a token would be no context for those that follow
        self._ids.extend(token_id for token_id in token_ids if self._tokenizer.has_token(token_id))
        before = self._tokenizer.decode(self._ids[: self._emitted])
        after = self._tokenizer.decode(self._ids)
        if after.endswith("\ufffd"):
            return ""
        start = max(len(self._ids) - self.CONTEXT, 0)
        self._ids, self._emitted = self._ids[start:], len(self._ids) - start
        return after[len(before) :]

    def flush(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._emitted])
        text = self._tokenizer.decode(self._ids)[len(before) :]
        self._emitted = len(self._ids)
        return text
