"""Qwen3.5's dialogues: XML calls and <think> are read by the family's own chat format; the template has its say."""

from __future__ import annotations

import json

import pytest
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.chat_syntax import AnswerParser, ParserSettings, Tool, start_after
from pegainfer_core.errors import RequestError
from pegainfer_core.testing.tiny_chat import write_tiny_chat
from pegainfer_qwen35.family import Qwen35Family
from pegainfer_qwen35.testing import write_tiny_qwen35

SYSTEM_FIRST = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
"""What Qwen3.5's template insists on."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> TemplateChatFormat:
    path = write_tiny_chat(write_tiny_qwen35(tmp_path_factory.mktemp("chat")), template=SYSTEM_FIRST)
    family = Qwen35Family()
    found = family.chat_format(family.tokenizer(path), path)
    assert isinstance(found, TemplateChatFormat)
    return found


def test_the_system_message_comes_first(chat: TemplateChatFormat) -> None:
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
    assert chat.render([system, user]).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    with pytest.raises(RequestError, match="System message must be at the beginning"):
        chat.render([user, system])


def test_thinking_and_calls_are_read(chat: TemplateChatFormat) -> None:
    prompt = chat.render([{"role": "user", "content": "How is the weather?"}])
    syntax = chat.syntax
    assert syntax is not None
    start = start_after(syntax, prompt, None)
    parser = AnswerParser(syntax, ParserSettings(tools={"weather": Tool("weather")}, start=start))
    answer = (
        "Let me look.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    events = [event for letter in answer for event in parser.push(letter)] + list(parser.finish(cut=False))
    texts: dict[str, str] = {}
    for event in events:
        if text := getattr(event, "text", None):
            texts[type(event).__name__] = texts.get(type(event).__name__, "") + text
    assert texts["ReasoningDelta"].strip() == "Let me look."
    assert texts["ContentDelta"].strip() == "One moment."
    assert json.loads(texts["ToolArgumentsDelta"]) == {"city": "Paris"}
    assert [event.name for event in events if hasattr(event, "name")] == ["weather"]
