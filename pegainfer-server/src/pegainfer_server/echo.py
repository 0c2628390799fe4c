"""The prompt as part of a completion (echo): its text, and where each of its tokens begins in it."""

from __future__ import annotations

from pegainfer_core.tokenizer import Detokenizer, Tokenizer

from pegainfer_server.prompts import Prompt


def echo_text(prompt: Prompt, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> str:
    """A text prompt as it was given; token ids decoded."""
    if prompt.text is not None:
        return prompt.text
    return tokenizer.decode(prompt.ids, skip_special_tokens=skip_special_tokens)


def token_offsets(prompt: Prompt, tokenizer: Tokenizer, text: str, *, skip_special_tokens: bool) -> list[int]:
    """Where each prompt token's text begins in `text` (from `echo_text`).

    Special tokens that the tokenizer put before a text prompt are not in the text and begin at 0. Where the tokenizer normalises the
    text, offsets are those of the normalised text, cut to the given one's length.
    """
    keep_special = prompt.text is not None  # what the user wrote out is in the text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens and not keep_special)
    begins: list[int] = []
    length = 0
    for token_id in prompt.ids:
        begins.append(length)
        length += len(detokenizer.push((token_id,)))
    length += len(detokenizer.flush())
    added = 0
    if prompt.text is not None and tokenizer.decode(prompt.ids).endswith(text):
        added = length - len(text)
    return [min(max(0, begin - added), len(text)) for begin in begins]
