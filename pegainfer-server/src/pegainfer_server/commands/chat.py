"""`pegainfer chat`: talk to a server, or to a model without one.

Owns the conversation and its commands. Where answers come from is behind `Speaker` (`speakers.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import PegainferError

from pegainfer_server.flags import API_KEY_VARIABLE, with_engine_flags
from pegainfer_server.sampling_flags import Further, MaxTokens, Temperature, TopK, TopP, given_fields

if TYPE_CHECKING:
    from pegainfer_server.speakers import Speaker

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = "/clear forgets the conversation, /exit ends (so does Ctrl-D); Ctrl-C stops an answer."


@with_engine_flags(model_required=False)
def chat(
    config: EngineConfig | None,
    url: Annotated[str | None, typer.Option(help=f"Server to talk to. Default without MODEL: {DEFAULT_URL}.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help=f"Key to send to the server; default: {API_KEY_VARIABLE}.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Model to ask for; default: the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this one thing, print the answer and end.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    sampling: Further = [],  # noqa: B006 - typer copies it
) -> None:
    """Chat with MODEL, or with a running server.

    Without a terminal, standard input is the one message to answer.
    """
    fields = given_fields(max_tokens, temperature, top_p, top_k, sampling)
    if config is not None:
        for flag, value in (("--url", url), ("--api-key", api_key), ("--model-name", model_name)):
            if value is not None:
                raise typer.BadParameter(f"{flag} is for a running server; MODEL needs none")
    if prompt is None and not sys.stdin.isatty():
        prompt = piped_message()
    for flag, text in (("--prompt", prompt), ("--system", system)):
        if text is not None and not text.strip():
            raise typer.BadParameter(f"{flag} must not be empty")
        if text is not None and not is_unicode(text):
            raise typer.BadParameter(f"{flag} is not UTF-8")
    with open_speaker(
        config,
        url or DEFAULT_URL,
        api_key or os.environ.get(API_KEY_VARIABLE, "").partition(",")[0].strip() or None,
        model_name,
        fields,
    ) as speaker:
        conversation = Conversation(speaker, system)
        if prompt is not None:
            conversation.say(prompt)
        else:
            talk(conversation)


def is_unicode(text: str) -> bool:
    """Whether a text from the system was whole: Python hands on other bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def piped_message() -> str:
    """The message on standard input, without the newline that ends a text. Raises typer.BadParameter if there is none."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise typer.BadParameter("standard input holds no message; without a terminal it is the one message to answer")
    return text


@contextlib.contextmanager
def open_speaker(
    config: EngineConfig | None, url: str, api_key: str | None, model_name: str | None, fields: dict[str, Any]
) -> Iterator[Speaker]:
    """Whom to talk to: a model in this process, else a server."""
    if config is None:
        from pegainfer_server.speakers import RemoteSpeaker

        with RemoteSpeaker(url, api_key, model_name, fields) as remote:
            yield remote
        return
    from pegainfer_server.local import open_llm
    from pegainfer_server.progress import showing_progress
    from pegainfer_server.speakers import LocalSpeaker

    with contextlib.ExitStack() as stack:
        with showing_progress(lines=False) as on_progress:
            llm = stack.enter_context(open_llm(config, on_progress))
        yield LocalSpeaker(llm, fields)


class Conversation:
    """Messages so far, and how one more is answered."""

    def __init__(self, speaker: Speaker, system: str | None) -> None:
        self._speaker = speaker
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> None:
        """Send a message and print the answer as it comes. An answer that fails leaves no trace in the conversation."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._speaker.reply(self.messages):
                answer += piece
                typer.echo(piece, nl=False)
        except PegainferError:
            self.messages = before
            raise
        finally:
            typer.echo()
        self.messages.append({"role": "assistant", "content": answer})


def talk(conversation: Conversation) -> None:
    """The interactive loop."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history
    typer.echo(HELP, err=True)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        except UnicodeDecodeError as error:
            typer.echo(f"error: this is not UTF-8: {error}", err=True)
            continue
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
        elif text.startswith("/"):
            typer.echo(f"there is no command {text.split()[0]}. {HELP}", err=True)
        elif not is_unicode(text):
            typer.echo("error: this is not UTF-8", err=True)
        elif text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    before = list(conversation.messages)
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        conversation.messages = before
        typer.echo("(stopped; the exchange is forgotten)", err=True)
    except PegainferError as error:
        typer.echo(f"error: {error}", err=True)
