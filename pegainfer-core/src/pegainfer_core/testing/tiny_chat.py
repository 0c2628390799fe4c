"""The tiny tokenizer and ChatML template with thinking and tools, for tests of dialogues. Any text can still be encoded.

Owns a template of the usual kind: tools in a system message, `enable_thinking`, calls and results in the history. It stands for
those of real checkpoints, whose wording it does not share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from pegainfer_core.testing.tiny_tokenizer import EOS_ID, PAD_ID, SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer

PLAIN_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Single tokens that are not special, as Qwen's tokenizers have them."""

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.id + ' ' + call.function.name }}
{%- for name, value in call.function.arguments | items %}{{- ' ' + name + '=' + (value | tojson) }}{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- if message.tool_call_id %}{{- ' for ' + message.tool_call_id }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined %}
{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def tiny_chat_tokenizer(plain: Sequence[str] = PLAIN_MARKS, special: Sequence[str] = ()) -> Tokenizer:
    """The tiny tokenizer whose last ids are these marks; as many ids as ever."""
    tokenizer = tiny_tokenizer(VOCAB_SIZE - len(plain) - len(special))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in plain])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_tiny_chat(
    path: Path, plain: Sequence[str] = PLAIN_MARKS, special: Sequence[str] = (), template: str = TEMPLATE
) -> Path:
    """Write the tokenizer and the template into a directory, over those of a checkpoint that may be there."""
    tiny_chat_tokenizer(plain, special).save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path
