"""A served tiny model without an engine: the application over a scripted client, and how to talk to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, write_tiny_tokenizer
from pegainfer_core.tokenizer import Tokenizer, load_tokenizer
from pegainfer_server.app import create_app
from pegainfer_server.state import ServerState


@dataclasses.dataclass
class Served:
    """One application and what is behind it."""

    app: FastAPI
    http: httpx.AsyncClient
    engine: FakeEngineClient
    state: ServerState
    tokenizer: Tokenizer

    def answers(self, text: str) -> None:
        """Let every request be answered with `text`, then EOS."""
        ids = self.tokenizer.encode(text)
        self.engine.script = lambda _: ids

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        """The JSON of an answer that must have this status."""
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def complete(self, **body: Any) -> Any:
        """A completion that must succeed."""
        return await self.post("/v1/completions", {"prompt": "Hello", "max_tokens": 64, **body})

    async def chat(self, **body: Any) -> Any:
        """A chat completion that must succeed."""
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **body})

    async def refused(self, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        """The error object of an answer that must be an error."""
        data = await self.post(path, body, status)
        assert set(data) == {"error"}
        error: dict[str, Any] = data["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny tokenizer and its chat template."""
    path = tmp_path_factory.mktemp("checkpoint")
    write_tiny_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """The tiny tokenizer."""
    return load_tokenizer(checkpoint)


@pytest.fixture
async def serve(checkpoint: Path, tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """Builds applications; keyword arguments go to ServerState, but max_model_len, ready, auto and tokens_per_step to the engine."""
    async with AsyncExitStack() as stack:

        async def make(
            *,
            max_model_len: int = 128,
            ready: bool = True,
            auto: bool = True,
            tokens_per_step: int = 1,
            **state_fields: Any,
        ) -> Served:
            info = fake_info(tokenizer.vocab_size, [EOS_ID], max_model_len)
            engine = FakeEngineClient(info, auto=auto, tokens_per_step=tokens_per_step)
            if ready:
                await engine.start()
            add_routes = state_fields.pop("add_routes", None)
            fields: dict[str, Any] = {
                "model_names": ("tiny", "alias"),
                "tokenizer": tokenizer,
                "chat_format": TemplateChatFormat(tokenizer, checkpoint),
                **state_fields,
            }
            state = ServerState(client=engine, **fields)
            app = create_app(state, add_routes)
            transport = httpx.ASGITransport(app=app)
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))
            return Served(app, http, engine, state, fields["tokenizer"] or tokenizer)

        yield make


@pytest.fixture
async def served(serve: Serve) -> Served:
    """The usual application."""
    return await serve()
