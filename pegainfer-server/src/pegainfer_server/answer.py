"""From choices to an HTTP response, streaming or not, for both generation routes.

Owns the order of events and where usage goes. What one choice looks like is a `Shape`, given by the route.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from pegainfer_core.client import EngineClient
from starlette.requests import Request
from starlette.responses import Response

from pegainfer_server.disconnect import unless_client_leaves
from pegainfer_server.generation import Choice, run_choices, usage
from pegainfer_server.prompts import off_loop
from pegainfer_server.protocol import GenerationBody, StreamOptions
from pegainfer_server.sse import DONE, EventStream, TextEvent, event
from pegainfer_server.text_stream import TextDelta


class Shape(ABC):
    """How one API words its choices. All methods return objects of the `choices` list."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    @abstractmethod
    def whole(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """A complete choice; `delta` is all of its deltas joined."""

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream sends before a choice's first delta."""

    @abstractmethod
    def chunks(self, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        """What a stream sends for one delta."""

    def beside(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What a complete answer carries beside its choices."""
        return {}

    @property
    @abstractmethod
    def text_only(self) -> bool:
        """Whether a delta without a finish reason differs from the next in its text only."""


def new_id(shape: type[Shape]) -> str:
    """A fresh id of a response."""
    return f"{shape.id_prefix}-{uuid.uuid4().hex}"


class Answer:
    """One checked request on its way to a response."""

    def __init__(
        self,
        response_id: str,
        model: str,
        body: GenerationBody,
        shape: Shape,
        choices: Sequence[Choice],
        client: EngineClient,
        arrival: float,
    ) -> None:
        """`arrival`: when the request came (perf_counter)."""
        self._body = body
        self._shape = shape
        self._choices = choices
        self._client = client
        self._arrival = arrival
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": shape.chunk_object_name if body.stream else shape.object_name,
            "created": int(time.time()),
            "model": model,
            **body.served_tier,
        }

    async def respond(self, request: Request) -> Response:
        """Run it. If the client leaves, everything of it in the engine is aborted."""
        if self._body.stream:
            return EventStream(self._events())
        return await unless_client_leaves(request, self._whole())

    def _deltas(self) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
        seconds = self._body.timeout
        left = None if seconds is None else seconds - (time.perf_counter() - self._arrival)
        return run_choices(self._choices, self._client, left)

    async def _whole(self) -> Response:
        parts: list[list[TextDelta]] = [[] for _ in self._choices]
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                parts[choice.index].append(delta)
        scored = sum(len(choice.prompt_logprobs or ()) for choice in self._choices)
        return await off_loop(scored, lambda: self._whole_response([_joined(deltas) for deltas in parts]))

    def _whole_response(self, texts: Sequence[TextDelta]) -> Response:
        choices = [self._shape.whole(choice, text) for choice, text in zip(self._choices, texts, strict=True)]
        data = {**self._head, "choices": choices, "usage": usage(self._choices)} | self._shape.beside(self._choices)
        return Response(msgspec.json.encode(data), media_type="application/json")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options or StreamOptions()
        if options.include_usage:
            self._head["usage"] = None
        fast = self._shape.text_only and not options.continuous_usage_stats
        templates: dict[int, TextEvent] = {}  # of choices that have begun
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                chunk = b""
                template = templates.get(choice.index)
                if template is None:
                    template = templates[choice.index] = self._template(choice)
                    opening = self._shape.opening(choice)
                    chunk = b"" if opening is None else self._event(opening, options)
                if fast and delta.finish_reason is None and delta.is_text:
                    chunk += template.with_text(delta.text) if delta.text else b""
                else:
                    chunk += b"".join(self._event(item, options) for item in self._shape.chunks(choice, delta))
                if chunk:
                    yield chunk
        if options.include_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._choices)})
        yield DONE

    def _event(self, choice: dict[str, Any], options: StreamOptions) -> bytes:
        data = {**self._head, "choices": [choice]}
        if options.continuous_usage_stats:
            data["usage"] = usage(self._choices)
        return event(data)

    def _template(self, choice: Choice) -> TextEvent:
        (chunk,) = self._shape.chunks(choice, TextDelta(text=TextEvent.MARK))
        return TextEvent({**self._head, "choices": [chunk]})


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    last = deltas[-1]
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_tokens=last.num_tokens,
        events=None if last.events is None else [event for delta in deltas for event in delta.events or ()],
        num_reasoning_tokens=last.num_reasoning_tokens,
    )
