"""Offline use: `LLM(model).generate(prompts)`.

Owns the conversion between text and ids around an engine in this process, and an event loop in a thread of its own, so that it works in
scripts and notebooks alike. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from pegainfer_core.chat import ChatFormat, Message
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import PegainferError, RequestError
from pegainfer_core.messages import AddRequest, EngineInfo, FinishReason, LoadProgress, RequestOutput, TokenLogprob
from pegainfer_core.plugins import load_plugins
from pegainfer_core.resolve import resolve_model
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.startup import start_engine
from pegainfer_core.thread_client import ThreadClient
from pegainfer_core.tokenizer import Detokenizer, Tokenizer

log = logging.getLogger(__name__)

Prompt = str | list[int]
DEFAULT_MAX_TOKENS = 16
"""Of prompts without sampling parameters, as in the OpenAI API: a prompt alone does not say when to stop."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one prompt gave."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_token_id: int | None
    num_cached_tokens: int
    num_output_tokens: int
    """Sampled tokens, the stopping one included."""
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to a streamed completion; the last one has a finish reason."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None


class LLM:
    """A model loaded into this process. Use as a context manager, or call `close`."""

    def __init__(
        self, model: str, *, on_progress: Callable[[LoadProgress], None] | None = None, **settings: Any
    ) -> None:
        """Load `model`; `settings` are fields of EngineConfig. Raises ConfigError and its kinds."""
        config = EngineConfig(model=str(model), **settings)
        resolved = resolve_model(config, load_plugins())
        for warning in resolved.warnings:
            log.warning("%s", warning)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="pegainfer-llm", daemon=True)
        self._loop_thread.start()
        self._num_requests = 0
        self._error: PegainferError | None = None
        self._client = ThreadClient(self._keep_error(functools.partial(start_engine, resolved.config)))
        try:
            self._run(self._client.start())
            if on_progress is not None:
                self._client.on_progress.append(on_progress)
            self.tokenizer: Tokenizer = resolved.load_tokenizer()
            self.chat_format: ChatFormat = resolved.load_chat_format(self.tokenizer)
            self.info: EngineInfo = self._run(self._client.wait_ready())
        except BaseException:
            self.close()
            if self._error is not None:
                raise self._error from None
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order; all run together. A prompt is text, or token ids.

        `params` is one for all or one per prompt; without any, an answer has at most 16 tokens, whereas `SamplingParams()` goes on to
        EOS or the end of the context. `on_finished(index)` is called as each ends. Raises RequestError for the first prompt that is
        refused.
        """
        many = _prompt_list(prompts)
        each = _params_list(params, len(many))
        return self._run(self._generate_all(many, each, on_finished))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The same for one prompt, step by step. Leaving the iterator early aborts the request."""
        outputs = self._client.generate(self._request(prompt, params or SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)))
        detokenizer = Detokenizer(self.tokenizer)
        try:
            while True:
                output = self._run(_next(outputs))
                if output is None:
                    return
                _check(output)
                text = detokenizer.push(output.token_ids)
                if output.finish_reason is not None:
                    text += detokenizer.flush()
                yield Delta(token_ids=output.token_ids, text=text, finish_reason=output.finish_reason)
        finally:
            self._run(_aclose(outputs))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_kwargs: Any
    ) -> Completion:
        """The assistant's next message; without `params` as long as the assistant makes it, or the context allows."""
        rendered = self.chat_format.render(messages, template_kwargs=template_kwargs)
        return self.generate([self.chat_format.encode(rendered)], params or SamplingParams())[0]

    def close(self) -> None:
        """Give back the device's memory; the object is of no use after."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_error(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the exception of a failed start, so that the caller sees its type and not only its text."""

        def started(on_progress: Callable[[LoadProgress], None]) -> Any:
            try:
                return start(on_progress)
            except PegainferError as error:
                self._error = error
                raise

        return started

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _request(self, prompt: Prompt, params: SamplingParams) -> AddRequest:
        self._num_requests += 1
        if isinstance(prompt, str):
            self.tokenizer.check_length(prompt, self.info.max_model_len)
            prompt_ids = self.tokenizer.encode(prompt)
        else:
            prompt_ids = list(prompt)
        return AddRequest(f"llm-{self._num_requests}", prompt_ids, params)

    async def _generate_all(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        on_finished: Callable[[int], None] | None,
    ) -> list[Completion]:
        requests = [self._request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        tasks = [asyncio.create_task(self._complete(index, r, on_finished)) for index, r in enumerate(requests)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, index: int, request: AddRequest, on_finished: Callable[[int], None] | None) -> Completion:
        outputs = [output async for output in self._client.generate(request)]
        last = outputs[-1]
        _check(last)
        assert last.finish_reason is not None
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [entry for output in outputs for entry in output.logprobs or []]
        if on_finished is not None:
            on_finished(index)
        return Completion(
            prompt_ids=list(request.prompt_ids),
            token_ids=token_ids,
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason=last.finish_reason,
            stop_token_id=last.stop_token_id,
            num_cached_tokens=next((o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None), 0),
            num_output_tokens=last.num_output_tokens,
            logprobs=logprobs,
            prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        )


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and isinstance(many[0], int):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling parameters")
    return list(params)


def _check(output: RequestOutput) -> None:
    if output.finish_reason == "rejected":
        raise RequestError(output.error or "rejected", output.rejection or "invalid_request")
    if output.finish_reason == "error":
        raise PegainferError(output.error or "the request failed")


async def _next(outputs: Any) -> RequestOutput | None:
    return await anext(outputs, None)


async def _aclose(outputs: Any) -> None:
    await outputs.aclose()
