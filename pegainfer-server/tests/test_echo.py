"""Echo offsets where the tokenizer adds or changes something."""

from __future__ import annotations

from pegainfer_core.testing.tiny_tokenizer import START_ID, tiny_tokenizer
from pegainfer_core.tokenizer import Tokenizer
from pegainfer_server.echo import echo_text, token_offsets
from pegainfer_server.prompts import Prompt
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing


def pieces(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str, list[str]]:
    """The echoed text, and each token's share of it."""
    text = echo_text(prompt, tokenizer, skip_special_tokens=True)
    offsets = token_offsets(prompt, tokenizer, text, skip_special_tokens=True)
    ends = [*offsets[1:], len(text)]
    return text, [text[begin:end] for begin, end in zip(offsets, ends, strict=True)]


def test_bos_that_the_tokenizer_adds_has_no_text() -> None:
    """B4."""
    backend = tiny_tokenizer()
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START_ID)], pair=None
    )
    tokenizer = Tokenizer(backend)
    prompt = Prompt(tokenizer.encode("Hello you"), "Hello you")
    assert prompt.ids[0] == START_ID
    text, shares = pieces(tokenizer, prompt)
    assert text == "Hello you" and shares[0] == ""
    assert shares[1:] == [tokenizer.token_text(token_id) for token_id in prompt.ids[1:]]


def test_special_tokens_written_by_the_user_have_their_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    prompt = Prompt(tokenizer.encode("<|im_start|>user"), "<|im_start|>user")
    text, shares = pieces(tokenizer, prompt)
    assert text == "<|im_start|>user" and shares[0] == "<|im_start|>"


def test_normalised_text_is_echoed_as_given_with_offsets_inside_it() -> None:
    backend = tiny_tokenizer()
    backend.normalizer = normalizers.Replace("abc", "a much longer thing")
    tokenizer = Tokenizer(backend)
    prompt = Prompt(tokenizer.encode("abc"), "abc")
    text, _ = pieces(tokenizer, prompt)
    offsets = token_offsets(prompt, tokenizer, text, skip_special_tokens=True)
    assert text == "abc" and offsets == sorted(offsets) and max(offsets) <= 3


def test_the_space_that_sentencepiece_adds_is_not_counted() -> None:
    vocab = {"\u2581a": 0, "\u2581b": 1, "\u2581": 2, "a": 3, "b": 4}
    backend = Backend(models.BPE(vocab, [("\u2581", "a"), ("\u2581", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    prompt = Prompt(tokenizer.encode("a b"), "a b")
    assert prompt.ids == [0, 1]
    assert pieces(tokenizer, prompt) == ("a b", ["a", " b"])
