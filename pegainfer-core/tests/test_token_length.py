"""Texts that cannot fit are known by their length, and never one that does fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegainfer_core.errors import RequestError
from pegainfer_core.testing.tiny_tokenizer import tiny_tokenizer
from pegainfer_core.testing.tiny_tokenizers import byte_fallback, byte_level, metaspace
from pegainfer_core.token_length import TokenLength
from pegainfer_core.tokenizer import SLACK_TOKENS, USUAL_CHARACTERS, Tokenizer
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

LONGEST = 13
"""Characters of <|endoftext|>, the longest token of the tiny tokenizer."""
ANGSTROM = "a\u0327\u030a\u0301"  # four characters that NFC makes two of


def length_of(backend: Backend) -> TokenLength:
    return TokenLength(backend, backend.get_vocab(with_added_tokens=True))


def normalized(normalizer: normalizers.Normalizer) -> Backend:
    backend = tiny_tokenizer()
    backend.normalizer = normalizer
    return backend


def test_the_bound_is_the_longest_token_times_the_tokens() -> None:
    length = length_of(tiny_tokenizer())
    assert length.most_characters("abc", 1) == LONGEST
    assert length.most_characters("abc", 100) == 100 * LONGEST


def test_composition_may_make_one_character_of_four() -> None:
    length = length_of(normalized(normalizers.NFC()))
    assert length.most_characters("\u00e1", 10) == 10 * LONGEST
    assert length.most_characters(ANGSTROM, 10) == 10 * LONGEST * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace("  ", " ")),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda backend: backend.add_special_tokens([AddedToken("<x>", rstrip=True, special=True)]),
    ],
)
def test_parts_that_can_swallow_any_amount_of_text_give_no_bound(change: Callable[[Backend], object]) -> None:
    backend = tiny_tokenizer()
    change(backend)
    assert length_of(backend).most_characters("abc", 1) is None


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(byte_level()),
        Tokenizer(byte_fallback()),
        Tokenizer(metaspace()),
        Tokenizer(normalized(normalizers.NFC())),
        Tokenizer(normalized(normalizers.NFKC())),
        Tokenizer(normalized(normalizers.Sequence([normalizers.NFD(), normalizers.Prepend("xy")]))),
    ],
)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from([*"ab <|endoftext|>", "\u0301", "\u0327", "\u0345", "\u1100", "\u1161", "\u4e00"])))
def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokenizer.check_length(text, len(ids))
    most = tokenizer._length.most_characters(text, len(ids))
    assert most is None or len(text) <= most


class Counting(Tokenizer):
    """Remembers how many characters it was given to tokenize."""

    seen: int = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.seen += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_beyond_the_bound_is_refused_without_being_tokenized() -> None:
    tokenizer = Counting(tiny_tokenizer())
    with pytest.raises(RequestError, match=r"prompt: a text of 13001 characters .* 1000 tokens") as caught:
        tokenizer.check_length("a" * 13001, 1000, "prompt")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert tokenizer.seen == 0


def test_of_a_longer_text_only_a_beginning_is_tokenized() -> None:
    backend = tiny_tokenizer()
    backend.add_special_tokens([AddedToken("<" + "x" * 998 + ">", special=True)])  # a bound that says nothing
    tokenizer = Counting(backend)
    with pytest.raises(RequestError):
        tokenizer.check_length("z" * 1_000_000, 1000)
    assert tokenizer.seen == USUAL_CHARACTERS * 1000 + SLACK_TOKENS
    tokenizer.check_length(("<" + "x" * 998 + ">") * 1000, 1000)


def test_an_ordinary_text_is_not_tokenized_to_be_checked() -> None:
    tokenizer = Counting(tiny_tokenizer())
    tokenizer.check_length("word " * 1600, 1000)
    assert tokenizer.seen == 0
