"""An engine client without an engine: it answers from a script, step by step, on the event loop that calls it.

For tests of what lies above the engine. It keeps the promises of `messages.py` (stop ids, max_tokens, logprobs, one end per request), but
computes nothing: tokens come from the script, logprobs are made up from token ids.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence

import msgspec

from pegainfer_core.client import EngineClient
from pegainfer_core.errors import RejectionCode
from pegainfer_core.messages import (
    AbortRequests,
    AddRequest,
    EngineInfo,
    EngineStats,
    FinishReason,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenLogprob,
)

Script = Callable[[AddRequest], Sequence[int]]
"""Ids that a request's sampler chooses, in order; after the last one, EOS."""

CACHED_TOKENS = 16  # what every prompt longer than this finds in the fake prefix cache
TIMES = (0.25, 0.5)


def echo_prompt(request: AddRequest) -> Sequence[int]:
    """The script that repeats the prompt."""
    return request.prompt_ids


def fake_logprob(token_id: int) -> float:
    """The made-up logprob of a token."""
    return -math.log(2.0 + token_id)


def fake_info(vocab_size: int, eos_token_ids: Sequence[int] = (0,), max_model_len: int = 128) -> EngineInfo:
    """An EngineInfo as a small engine would send it."""
    return EngineInfo(
        family="fake",
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        max_model_len=max_model_len,
        max_prefill_tokens=1024,
        max_running_requests=32,
        page_size=16,
        num_pages=100,
        vocab_size=vocab_size,
        eos_token_ids=list(eos_token_ids),
        weight_bytes=0,
        kv_cache_bytes=0,
        state_bytes=0,
        num_snapshots=0,
        timeline=[],
    )


@dataclasses.dataclass(slots=True)
class _Open:
    request: AddRequest
    script: list[int]
    sampled: list[int] = dataclasses.field(default_factory=list)
    begun: bool = False


class FakeEngineClient(EngineClient):
    """Serves a script. With `auto`, steps follow each other while requests are open; without, a test calls `step`."""

    def __init__(
        self, engine_info: EngineInfo, script: Script = echo_prompt, *, tokens_per_step: int = 1, auto: bool = True
    ) -> None:
        super().__init__()
        self.engine_info = engine_info
        self.script = script
        self.tokens_per_step = tokens_per_step
        self.auto = auto
        self.received: list[ToEngine] = []
        self.rejection: tuple[RejectionCode, str] | None = None
        """Set to refuse every request from now on."""
        self.closed = False
        self._open: dict[str, _Open] = {}
        self._stepping = False
        self._totals = EngineStats()

    async def start(self) -> None:
        """Become ready at once."""
        self.dispatch(self.engine_info)

    def send(self, message: ToEngine) -> None:
        """Take a message; requests are served by later steps. Tests find their ids as lists, however they were packed."""
        if isinstance(message, AddRequest):
            message = msgspec.structs.replace(message, prompt_ids=list(message.prompt_ids))
        self.received.append(message)
        if isinstance(message, AddRequest):
            self._open[message.request_id] = _Open(message, list(self.script(message)))
        elif isinstance(message, AbortRequests):
            ended = [self._open.pop(name) for name in message.request_ids if name in self._open]
            outputs = StepOutputs([self._end(item, "abort") for item in ended], self._stats(), 0)
            asyncio.get_running_loop().call_soon(self.dispatch, outputs)
        elif isinstance(message, Shutdown):
            self._open.clear()
        if self.auto and not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._auto_step)

    async def close(self) -> None:
        """End; open requests end with reason abort."""
        self.closed = True
        self.dispatch(StepOutputs([self._end(item, "abort") for item in self._open.values()], self._stats(), 0))
        self._open.clear()
        self._enter("closed")

    @property
    def requests(self) -> list[AddRequest]:
        """The requests that were sent, in order."""
        return [message for message in self.received if isinstance(message, AddRequest)]

    @property
    def aborted(self) -> list[str]:
        """Ids of aborts that were sent, in order."""
        return [name for message in self.received if isinstance(message, AbortRequests) for name in message.request_ids]

    @property
    def open_ids(self) -> list[str]:
        """Requests that the engine holds."""
        return list(self._open)

    def step(self) -> None:
        """Advance every open request by up to `tokens_per_step` tokens."""
        outputs = [self._advance(item) for item in self._open.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._open[output.request_id]
        self._totals = msgspec.structs.replace(
            self._totals,
            num_steps=self._totals.num_steps + 1,
            generation_tokens=self._totals.generation_tokens + sum(len(output.token_ids) for output in outputs),
        )
        self.dispatch(StepOutputs(outputs, self._stats(), sum(len(output.token_ids) for output in outputs)))

    def fail(self, request_id: str, message: str) -> None:
        """End one request with reason error."""
        item = self._open.pop(request_id)
        self.dispatch(StepOutputs([self._end(item, "error", error=message)], self._stats(), 0))

    def _auto_step(self) -> None:
        self.step()
        if self._open:
            asyncio.get_running_loop().call_soon(self._auto_step)
        else:
            self._stepping = False

    def _stats(self) -> EngineStats:
        pages = self.engine_info.num_pages
        return msgspec.structs.replace(
            self._totals, num_running=len(self._open), num_free_pages=pages - len(self._open), num_pages=pages
        )

    def _advance(self, item: _Open) -> RequestOutput:
        if self.rejection is not None:
            code, message = self.rejection
            return self._end(item, "rejected", error=message, rejection=code)
        begun, item.begun = item.begun, True
        prompt = item.request.prompt_ids
        cached = CACHED_TOKENS if len(prompt) > CACHED_TOKENS else 0
        if not begun:
            self._totals = msgspec.structs.replace(
                self._totals,
                prompt_tokens=self._totals.prompt_tokens + len(prompt),
                cached_tokens=self._totals.cached_tokens + cached,
            )
        reason, stop_id, new_ids = self._sample(item)
        params = item.request.params
        return RequestOutput(
            request_id=item.request.request_id,
            token_ids=new_ids,
            logprobs=None if params.logprobs is None else [_logprobs(i, params.logprobs) for i in new_ids],
            prompt_logprobs=_prompt_logprobs(prompt, params.prompt_logprobs) if not begun else None,
            num_cached_tokens=cached if not begun else None,
            finish_reason=reason,
            stop_token_id=stop_id,
            num_output_tokens=len(item.sampled),
            error=None,
            rejection=None,
            times=None if begun else TIMES,
        )

    def _sample(self, item: _Open) -> tuple[FinishReason | None, int | None, list[int]]:
        params = item.request.params
        most = len(item.script) + 1 if params.max_tokens is None else params.max_tokens
        new_ids: list[int] = []
        if most == 0:
            return "length", None, new_ids
        for _ in range(self.tokens_per_step):
            position = len(item.sampled)
            token_id = item.script[position] if position < len(item.script) else self.engine_info.eos_token_ids[0]
            item.sampled.append(token_id)
            if position >= params.min_tokens:
                if token_id in params.stop_token_ids:
                    return "stop", token_id, new_ids
                if token_id in self.engine_info.eos_token_ids and not params.ignore_eos:
                    return "stop", None, new_ids
            new_ids.append(token_id)
            if len(item.sampled) == most:
                return "length", None, new_ids
        return None, None, new_ids

    def _end(
        self, item: _Open, reason: FinishReason, *, error: str | None = None, rejection: RejectionCode | None = None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=item.request.request_id,
            token_ids=[],
            logprobs=None,
            prompt_logprobs=None,
            num_cached_tokens=None,
            finish_reason=reason,
            stop_token_id=None,
            num_output_tokens=len(item.sampled),
            error=error,
            rejection=rejection,
            times=None,
        )


def _logprobs(token_id: int, count: int) -> TokenLogprob:
    top = [(other, fake_logprob(other)) for other in range(count)]
    return TokenLogprob(token_id, fake_logprob(token_id), token_id + 1, top)


def _prompt_logprobs(prompt: Sequence[int], count: int | None) -> list[TokenLogprob | None] | None:
    return None if count is None else [None, *(_logprobs(token_id, count) for token_id in prompt[1:])]
