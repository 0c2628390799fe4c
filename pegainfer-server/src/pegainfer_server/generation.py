"""Choices of one HTTP request, run through the engine: outputs in, text deltas out.

Owns what completions and chat share: one engine request per choice, their merging, failures, aborts, usage and records. Knows nothing of
response shapes. Leaving any of the iterators early aborts what is still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from pegainfer_core.client import EngineClient
from pegainfer_core.messages import AbortRequests, AddRequest, RequestOutput, TokenLogprob

from pegainfer_server.http_errors import ApiError, rejected
from pegainfer_server.metrics import RequestRecord
from pegainfer_server.text_stream import TextDelta

log = logging.getLogger(__name__)


class OutputReader(Protocol):
    """What turns a choice's outputs into deltas: a TextStream or an AnswerStream."""

    def push(self, output: RequestOutput) -> TextDelta:
        """What `output` adds."""
        ...


class Choice:
    """One choice and what is known of it so far."""

    def __init__(
        self,
        index: int,
        prompt_index: int,
        request: AddRequest,
        reader: OutputReader,
        begin_record: Callable[[], RequestRecord],
        caller: Mapping[str, Any],
    ) -> None:
        """`caller`: what the client said about itself, for the log."""
        self.index = index
        self.prompt_index = prompt_index
        self.request = request
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.timed_out = False
        """Set before the abort that ends a request whose time is up."""
        self._caller = "".join(f", {name} {value!r}" for name, value in caller.items())
        self._reader = reader
        self._begin_record = begin_record

    @property
    def asks_nothing(self) -> bool:
        """Whether the engine has nothing to do for it: no token, and no logprobs of the prompt."""
        params = self.request.params
        return params.max_tokens == 0 and params.logprobs is None

    async def deltas(self, client: EngineClient) -> AsyncGenerator[TextDelta, None]:
        """Deltas that have something to tell; the last one, and only it, has a finish reason.

        Raises ApiError for a refusal or failure by the engine, EngineDeadError if it is or becomes dead.
        """
        if self.asks_nothing:
            yield TextDelta(finish_reason="length")
            return
        record = self._begin_record()
        reason = "abort"
        try:
            async with aclosing(client.generate(self.request)) as outputs:
                async for output in outputs:
                    record.saw(output)
                    if output.finish_reason in ("error", "rejected", "abort"):
                        reason = "error"
                        raise _timed_out() if self.timed_out else _failure(output)
                    delta = self._take(output)
                    if delta.finish_reason is not None:
                        break
                    if not delta.is_empty:
                        yield delta
                else:
                    raise AssertionError("the engine's stream ended without a finish reason")
            assert (
                delta.finish_reason is not None
            )  # the engine's stream is left: if a stop string was found, it is told now
            reason = delta.finish_reason
            yield delta
        except Exception:
            reason = "error"
            raise
        finally:
            record.end(reason)
            log.info(
                "%s: %d prompt tokens (%d cached), %d output tokens, %s%s",
                self.request.request_id,
                len(self.request.prompt_ids),
                self.cached_tokens,
                self.completion_tokens,
                reason,
                self._caller,
            )

    def _take(self, output: RequestOutput) -> TextDelta:
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        delta = self._reader.push(output)
        self.completion_tokens = delta.num_tokens
        self.reasoning_tokens = delta.num_reasoning_tokens
        return delta


async def run_choices(
    choices: Sequence[Choice], client: EngineClient, seconds: float | None = None
) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
    """Deltas of all choices as they come. One that fails fails the whole, and the others are aborted.

    After `seconds` what is open is ended, and this raises ApiError (408).
    """
    with _ended_after(seconds, choices, client):
        async with aclosing(_merged(choices, client)) as deltas:
            async for item in deltas:
                yield item


@contextmanager
def _ended_after(seconds: float | None, choices: Sequence[Choice], client: EngineClient) -> Iterator[None]:
    """The engine ends what is still open when the time is up; its answer to the abort is what ends the choice."""
    if seconds is None:
        yield
        return

    def expire() -> None:
        for choice in choices:
            choice.timed_out = True
        if client.state == "ready":
            client.send(AbortRequests([choice.request.request_id for choice in choices]))

    timer = asyncio.get_running_loop().call_later(max(0.0, seconds), expire)
    try:
        yield
    finally:
        timer.cancel()


async def _merged(choices: Sequence[Choice], client: EngineClient) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
    if len(choices) == 1:
        async with aclosing(choices[0].deltas(client)) as deltas:
            async for delta in deltas:
                yield choices[0], delta
        return
    merged: asyncio.Queue[tuple[Choice, TextDelta] | Exception | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(choice.deltas(client)) as deltas:
                async for delta in deltas:
                    merged.put_nowait((choice, delta))
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """The usage object: every prompt counts once, however many choices it has."""
    first = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(len(choice.request.prompt_ids) for choice in first)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }


def _timed_out() -> ApiError:
    # clients of the OpenAI API would send a 408 again by themselves
    headers = {"x-should-retry": "false"}
    return ApiError(408, "timeout: the request's time is up", code="timeout", param="timeout", headers=headers)


def _failure(output: RequestOutput) -> ApiError:
    if output.finish_reason == "rejected":
        message = output.error or "the engine refused the request"
        return rejected(message, output.rejection or "invalid_request", output.rejected_param)
    if output.finish_reason == "abort":
        return ApiError(503, "the request was aborted by the server", code="aborted")
    return ApiError(500, f"the engine failed this request: {output.error}", code="engine_error")
