"""Where the answers of `pegainfer chat` come from: a model in this process, or a server that speaks the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from pegainfer_core.errors import PegainferError

from pegainfer_server.sampling_flags import sampling_params

if TYPE_CHECKING:
    from pegainfer_core.llm import LLM

CONNECT_SECONDS = 10.0
Messages = Sequence[Mapping[str, str]]


class Speaker(Protocol):
    """Somebody who answers."""

    def reply(self, messages: Messages) -> Iterator[str]:
        """The answer to a conversation, piece by piece. Raises PegainferError."""
        ...


class LocalSpeaker:
    """A model in this process."""

    def __init__(self, llm: LLM, fields: Mapping[str, Any]) -> None:
        self._llm = llm
        self._params = sampling_params(fields)

    def reply(self, messages: Messages) -> Iterator[str]:
        """See Speaker."""
        prompt = self._llm.chat_format.encode(self._llm.chat_format.render(messages))
        for delta in self._llm.stream(prompt, self._params):
            if delta.text:
                yield delta.text


class RemoteSpeaker:
    """A server. Use as a context manager."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model_name: str | None,
        fields: Mapping[str, Any],
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Tokens may be far apart on a slow machine: only connecting has a limit.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)
        self._model_name = model_name
        self._fields = dict(fields)

    def __enter__(self) -> RemoteSpeaker:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def reply(self, messages: Messages) -> Iterator[str]:
        """See Speaker."""
        try:
            body = {"model": self._model(), "messages": list(messages), "stream": True, **self._fields}
            with self._http.stream("POST", f"{self._base}/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise PegainferError(f"{self._base}: {error_message(response)}")
                yield from _pieces(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PegainferError(f"cannot talk to {self._base}: {str(error) or type(error).__name__}") from error

    def _model(self) -> str:
        if self._model_name is None:
            response = self._http.get(f"{self._base}/models")
            if response.status_code != httpx.codes.OK:
                raise PegainferError(f"{self._base}: {error_message(response)}")
            try:
                self._model_name = str(response.json()["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise PegainferError(f"{self._base}/models names no model; is this an OpenAI API?") from error
        return self._model_name


def error_message(response: httpx.Response) -> str:
    """What an error response says: its status, and the message if it is an OpenAI error object."""
    try:
        return f"{response.status_code} {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Text of a stream of server-sent chunks. Raises PegainferError for an error event and for a stream that breaks off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise PegainferError(str(chunk["error"].get("message", chunk["error"])))
        for choice in chunk.get("choices", []):
            if content := choice.get("delta", {}).get("content"):
                yield content
    raise PegainferError("the server ended the stream early")
