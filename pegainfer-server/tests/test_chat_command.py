"""`pegainfer chat`: the conversation, its commands, and what a server may answer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from pegainfer_core.errors import PegainferError
from pegainfer_server.cli import main
from pegainfer_server.commands import chat
from pegainfer_server.speakers import RemoteSpeaker

ASK = [{"role": "user", "content": "Hi"}]


class Parrot:
    """Repeats the last message in two pieces, and remembers what it was told."""

    def __init__(self, fails: bool = False, interrupts: bool = False) -> None:
        self.fails = fails
        self.interrupts = interrupts
        self.heard: list[list[Mapping[str, str]]] = []

    def reply(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        self.heard.append(list(messages))
        text = messages[-1]["content"]
        yield text[:1]
        if self.fails:
            raise PegainferError("no more")
        if self.interrupts:
            raise KeyboardInterrupt
        yield text[1:]


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user types; then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_a_conversation_grows_and_can_be_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "one", "  ", "two", "/clear", "three", "/nonsense", "/exit", "never")
    parrot = Parrot()
    chat.talk(chat.Conversation(parrot, "Be brief."))
    system = {"role": "system", "content": "Be brief."}
    roles = [[message["role"] for message in heard] for heard in parrot.heard]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert parrot.heard[1][:3] == [system, {"role": "user", "content": "one"}, {"role": "assistant", "content": "one"}]
    out, err = capsys.readouterr()
    assert out == "one\ntwo\nthree\n"
    assert "there is no command /nonsense" in err


@pytest.mark.parametrize(
    ("parrot", "message"), [(Parrot(fails=True), "error: no more"), (Parrot(interrupts=True), "stopped")]
)
def test_an_answer_that_breaks_off_is_forgotten(
    parrot: Parrot, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "one")
    conversation = chat.Conversation(parrot, None)
    chat.talk(conversation)
    assert conversation.messages == []
    assert message in capsys.readouterr().err


def serving(answer: httpx.Response, seen: list[httpx.Request] | None = None) -> RemoteSpeaker:
    """A speaker whose server lists one model and answers every chat with `answer`."""

    def respond(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return answer

    return RemoteSpeaker("http://host:1/", "key", None, {"temperature": 0}, httpx.MockTransport(respond))


def events(*chunks: Any) -> httpx.Response:
    text = "".join(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks)
    return httpx.Response(200, text=f": a comment\n\n{text}")


def piece(text: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]}


def test_a_streamed_answer_arrives_piece_by_piece() -> None:
    seen: list[httpx.Request] = []
    last = {"choices": [], "usage": {"prompt_tokens": 1}}
    with serving(events(piece(""), piece("He"), piece(None), piece("llo"), last, "[DONE]"), seen) as speaker:
        assert list(speaker.reply(ASK)) == ["He", "llo"]
        assert list(speaker.reply(ASK)) == ["He", "llo"]
    assert [request.url.path for request in seen] == ["/v1/models", "/v1/chat/completions", "/v1/chat/completions"]
    assert seen[1].headers["authorization"] == "Bearer key"
    assert json.loads(seen[1].content) == {"model": "m", "messages": ASK, "stream": True, "temperature": 0}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "a key is needed"}}), "http://host:1/v1: 401 a key is needed"),
        (httpx.Response(502, text="<html>"), "http://host:1/v1: 502 Bad Gateway"),
        (events(piece("He"), {"error": {"message": "the engine died"}}), "the engine died"),
        (events(piece("He")), "the server ended the stream early"),
    ],
)
def test_errors_of_a_server_are_told(answer: httpx.Response, message: str) -> None:
    with serving(answer) as speaker, pytest.raises(PegainferError) as caught:
        list(speaker.reply(ASK))
    assert str(caught.value) == message


def test_a_server_that_is_no_openai_api_is_told() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="hello"))
    speaker = RemoteSpeaker("http://host:1/v1", None, None, {}, transport)
    with speaker, pytest.raises(PegainferError, match="names no model; is this an OpenAI API"):
        list(speaker.reply(ASK))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", "ftp://x"])
def test_a_server_that_cannot_be_reached_is_told(url: str) -> None:
    with RemoteSpeaker(url, None, None, {}) as speaker, pytest.raises(PegainferError, match="cannot talk to"):
        list(speaker.reply(ASK))


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Standard input that is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"Hello\n", "Hello"),
        (b"Hello\r\n", "Hello"),
        (b"Hello", "Hello"),
        (b"  two\n\nlines \n\n", "  two\n\nlines \n"),
        ("Gr\u00fc\u00dfe\n".encode(), "Gr\u00fc\u00dfe"),
    ],
)
def test_a_piped_message_loses_the_newline_that_ends_it(
    monkeypatch: pytest.MonkeyPatch, data: bytes, text: str
) -> None:
    pipe(monkeypatch, data)
    assert chat.piped_message() == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "standard input holds no message"),
        (b"\n", "standard input holds no message"),
        (b"\xff\xfe", "standard input is not UTF-8"),
    ],
)
def test_standard_input_without_a_message_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: bytes, message: str
) -> None:
    pipe(monkeypatch, data)
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--prompt", " ", "--prompt must not be empty"),
        ("--system", "", "--system must not be empty"),
        ("--prompt", "\udcff", "--prompt is not UTF-8"),
        ("--system", "\udcff", "--system is not UTF-8"),
    ],
)
def test_a_text_flag_that_says_nothing_is_a_usage_error(
    capfd: pytest.CaptureFixture[str], flag: str, text: str, message: str
) -> None:
    arguments = ["chat", "--url", "http://127.0.0.1:1", flag, text]
    assert main(arguments if flag == "--prompt" else [*arguments, "--prompt", "Hi"]) == 2
    assert message in capfd.readouterr().err


def test_a_line_that_is_not_utf_8_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "\udcff", "one")
    parrot = Parrot()
    chat.talk(chat.Conversation(parrot, None))
    assert [heard[-1]["content"] for heard in parrot.heard] == ["one"]
    assert "error: this is not UTF-8" in capsys.readouterr().err
