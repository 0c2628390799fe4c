"""A real but small byte-level BPE tokenizer with a ChatML template, for tiny checkpoints.

Owns 512 ids: three special tokens, 256 bytes, 253 merges learned from the text below. Any text can be encoded.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
PAD_ID, START_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_TEXT = """\
The engine serves many requests at once. Each request brings a prompt, and the answer is written token after token.
A scheduler decides which tokens are computed next; pages of memory hold the keys and values that later tokens look at.
When two prompts start with the same words, the second one finds the pages of the first and need not compute them.
Numbers such as 0, 1, 2, 3, 10, 16, 32, 64, 128, 256, 512 and 1024 are common here; so are system, user and assistant.
Hello world! How are you today? I am fine, thank you. What is the capital of France? The capital of France is Paris.
Once upon a time there was a small cat who lived in a quiet house near the river and liked to sleep in the morning sun.
def main(argument): return [value for value in argument if value is not None]
"""


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """The tokenizer, the same on every call; with fewer ids it has fewer merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the text must be long enough for all merges"
    return tokenizer


def write_tiny_tokenizer(path: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which holds the chat template, into the directory `path`."""
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
