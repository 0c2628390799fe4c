"""`pegainfer serve` on a GPU: the command, the engine process, and the OpenAI client's usual calls."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from pegainfer_core.testing.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from pegainfer_qwen3.testing import write_tiny_qwen3

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
COMMAND = [sys.executable, "-c", "import sys; from pegainfer_server.cli import main; sys.exit(main())"]
PROMPT = [len(SPECIAL_TOKENS) + (7 * index) % (VOCAB_SIZE - len(SPECIAL_TOKENS)) for index in range(50)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server that has said where it listens; the server must end well when told to."""
    path = write_tiny_qwen3(tmp_path_factory.mktemp("model"), torch_dtype="bfloat16")
    serve = [*COMMAND, "serve", str(path), "--device", DEVICE, "--port", "0", "--served-model-name", "tiny"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            yield openai.OpenAI(base_url=_address(server), api_key="none", max_retries=0, timeout=120)
            server.send_signal(signal.SIGTERM)
            output, _ = server.communicate(timeout=60)
            assert server.returncode == 0, output
        finally:
            server.kill()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    printed = []
    for line in server.stdout:
        printed.append(line)
        if (found := re.search(r"at (http://\S+/v1)", line)) is not None:
            return found[1]
    raise AssertionError("".join(printed))


def _text(client: openai.OpenAI, prompt: list[int]) -> str:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, temperature=0)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    return answer.choices[0].text


def test_completion_repeats_itself_and_streams_the_same_text(client: openai.OpenAI) -> None:
    text = _text(client, PROMPT)
    assert text
    assert _text(client, PROMPT) == text
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text


def test_chat_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
        seed=1,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)


def test_bad_input_leaves_the_server_answering(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[VOCAB_SIZE + 5], max_tokens=4)
    assert _text(client, PROMPT)
