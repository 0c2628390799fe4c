"""Small tokenizers of each kind, written as checkpoints hold them. For tests of text handling; no model goes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("<s>", "</s>", "<|sep|>")


def _merged(vocabulary: dict[str, int], words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that build each word from the left; adds what they make to the vocabulary."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if pair not in merges:
                merges.append(pair)
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
    return merges


def byte_level(words: Sequence[str] = ("hello", "\u0120world", "\u00f0\u0141\u013a")) -> Tokenizer:
    """Byte-level BPE, as Qwen and Llama 3 have it: 256 bytes, a few words, special tokens at the end."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merged(vocabulary, words)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(["<tool>", "two words"])
    return tokenizer


def byte_fallback(words: Sequence[str] = ("\u2581hello", "\u2581world", "\u00e9")) -> Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 has it: a space before the first word, BOS in front."""
    vocabulary = {token: index for index, token in enumerate(("<unk>", "<s>", "</s>"))}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "\u2581abcdefghijklmnopqrstuvwxyz\u00e9":
        vocabulary[char] = len(vocabulary)
    merges = _merged(vocabulary, words)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(words: Sequence[str] = ("\u2581hello", "\u2581world")) -> Tokenizer:
    """Unigram with the Metaspace decoder, which treats the first token of a text in its own way."""
    pieces = [
        ("<unk>", 0.0),
        *((word, -1.0) for word in words),
        *((char, -3.0) for char in "\u2581abcdefghijklmnopqrstuvwxyz"),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def save(tokenizer: Tokenizer, path: Path, **config: Any) -> Path:
    """Write tokenizer.json and a tokenizer_config.json with `config` into a directory."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
