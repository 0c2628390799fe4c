"""BOS is in a prompt once, whoever writes it: the tokenizer of a text, the template of a chat, the caller of token ids (B4)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.testing import tiny_tokenizers
from pegainfer_core.tokenizer import Tokenizer

BOS = 1
TEMPLATE = "<s>{% for message in messages %}{{ message.content }}{% endfor %}"


async def test_bos_is_there_once(serve: Callable[..., Awaitable[Any]], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    tokenizer = Tokenizer(tiny_tokenizers.byte_fallback())
    served = await serve(tokenizer=tokenizer, chat_format=TemplateChatFormat(tokenizer, tmp_path))
    text_ids = tokenizer.encode("hello")
    assert text_ids[0] == BOS and text_ids.count(BOS) == 1
    await served.complete(prompt="hello")
    await served.complete(prompt="hello", add_special_tokens=False)
    await served.complete(prompt=text_ids[1:])
    await served.chat(messages=[{"role": "user", "content": "hello"}])
    completed, bare, ids, chat = (request.prompt_ids for request in served.engine.requests)
    assert completed == text_ids
    assert bare == ids == text_ids[1:]
    assert chat[0] == BOS and chat.count(BOS) == 1
