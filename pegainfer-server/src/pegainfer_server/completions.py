"""POST /v1/completions: the legacy text API, with prompts as text or token ids, echo, and parallel-list logprobs.

Owns the request's meaning and the shape of its choices. Choices are numbered prompt by prompt: index = prompt number * n + k.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import APIRouter
from pegainfer_core.messages import AddRequest, EngineInfo, pack_ids
from pegainfer_core.tokenizer import Detokenizer, Tokenizer
from starlette.requests import Request
from starlette.responses import Response

from pegainfer_server.answer import Answer, Shape, new_id
from pegainfer_server.body import read_body
from pegainfer_server.echo import echo_text, token_offsets
from pegainfer_server.generation import Choice
from pegainfer_server.http_errors import bad_request
from pegainfer_server.logprobs import LegacyLogprobs, TokenWriter
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.openapi import body_docs
from pegainfer_server.prompts import Prompt, read_prompts
from pegainfer_server.protocol import MAX_CHOICES, CompletionBody
from pegainfer_server.sampling import (
    check_prompt_logprobs,
    clamp_max_tokens,
    for_choice,
    requested_max_tokens,
    sampling_params,
    unsupported,
)
from pegainfer_server.state import ServerState
from pegainfer_server.system import served_name
from pegainfer_server.text_stream import TextDelta, TextStream

DEFAULT_MAX_TOKENS = 16  # as the OpenAI API


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The route, for `create_app`."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=body_docs(CompletionBody))
    async def completions(request: Request) -> Response:
        """Complete one or several prompts."""
        arrival = time.perf_counter()
        info, tokenizer = state.serving()
        body = await read_body(request, CompletionBody, state.max_body_bytes)
        model = served_name(state, body.model)
        _check(body)
        most = MAX_CHOICES // body.n
        prompts = await read_prompts(
            body.prompt, tokenizer, info, most=most, add_special_tokens=body.add_special_tokens
        )
        response_id = new_id(CompletionShape)
        shape = CompletionShape(body, prompts, tokenizer)
        requests = _engine_requests(body, prompts, state, info, response_id)
        metrics.observe("request_params_n", body.n)
        choices = [
            Choice(
                index,
                index // body.n,
                item,
                shape.text_stream(index // body.n),
                metrics.recorder(arrival, item),
                body.caller,
            )
            for index, item in enumerate(requests)
        ]
        return await Answer(response_id, model, body, shape, choices, state.client, arrival).respond(request)

    return routes


def _check(body: CompletionBody) -> None:
    if body.best_of not in (None, body.n):
        raise unsupported("best_of", f"only the value of n ({body.n}) is supported, got {body.best_of}")
    check_prompt_logprobs(body)
    if requested_max_tokens(body) == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens: 0 is supported with echo or prompt_logprobs only", "max_tokens")


def _engine_requests(
    body: CompletionBody, prompts: list[Prompt], state: ServerState, info: EngineInfo, response_id: str
) -> list[AddRequest]:
    wanted = requested_max_tokens(body)
    wanted = DEFAULT_MAX_TOKENS if wanted is None else wanted
    logprobs = body.logprobs
    asked = [count for count in (logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
    of_prompt = max(asked, default=None)
    if wanted == 0 and of_prompt is None:
        of_prompt = 0  # echo alone, which never reaches the engine
    elif wanted == 0 and logprobs is None:
        logprobs = 0  # the prompt's alone, which does
    params = sampling_params(
        body,
        state.default_sampling,
        info,
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        grammar=body.grammar(),
    )
    requests: list[AddRequest] = []
    for prompt in prompts:
        max_tokens = clamp_max_tokens(wanted, len(prompt.ids), info)
        ids = pack_ids(prompt.ids)
        for k in range(body.n):
            choice_params = for_choice(params, max_tokens=max_tokens, choice=k)
            request_id = f"{response_id}-{len(requests)}"
            requests.append(AddRequest(request_id, ids, choice_params, body.cache_salt, body.queue_priority))
    return requests


class CompletionShape(Shape):
    """Choices of completions. With echo, a choice's text, logprobs and offsets begin with the prompt's."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, body: CompletionBody, prompts: list[Prompt], tokenizer: Tokenizer) -> None:
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._writer = TokenWriter(tokenizer, as_ids=body.return_tokens_as_token_ids)
        skip = body.skip_special_tokens
        self._echoes = [
            echo_text(prompt, tokenizer, skip_special_tokens=skip) if body.echo else "" for prompt in prompts
        ]

    def text_stream(self, prompt_index: int) -> TextStream:
        """The text stream of one choice of a prompt."""
        return TextStream(
            Detokenizer(self._tokenizer, skip_special_tokens=self._body.skip_special_tokens, continues=True),
            stops=self._body.stop,
            include_stop=self._body.include_stop_str_in_output,
            min_tokens=self._body.min_tokens,
            offset=len(self._echoes[prompt_index]),
        )

    @property
    def text_only(self) -> bool:
        """See Shape."""
        return self._body.logprobs is None and not self._body.return_token_ids

    def whole(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """See Shape."""
        logprobs = self._new_logprobs()
        if logprobs is not None:
            self._add_prompt(logprobs, choice)
        text = self._echoes[choice.prompt_index] + delta.text
        data = self._choice(choice, dataclasses.replace(delta, text=text), logprobs, with_prompt_ids=True)
        if self._body.prompt_logprobs is not None:
            assert choice.prompt_logprobs is not None, "the engine sends prompt logprobs no later than the first token"
            data["prompt_logprobs"] = self._writer.prompt_entries(choice.prompt_logprobs, self._body.prompt_logprobs)
        return data

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """See Shape."""
        if not self._body.echo and not self._body.return_token_ids:
            return None
        logprobs = self._new_logprobs()
        if logprobs is not None:
            self._add_prompt(logprobs, choice)
        return self._choice(choice, TextDelta(text=self._echoes[choice.prompt_index]), logprobs, with_prompt_ids=True)

    def chunks(self, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        """See Shape."""
        return [self._choice(choice, delta, self._new_logprobs(), with_prompt_ids=False)]

    def _new_logprobs(self) -> LegacyLogprobs | None:
        return None if self._body.logprobs is None else LegacyLogprobs(self._writer, self._body.logprobs)

    def _add_prompt(self, logprobs: LegacyLogprobs, choice: Choice) -> None:
        if not self._body.echo:
            return
        assert choice.prompt_logprobs is not None, "the engine sends prompt logprobs no later than the first token"
        prompt = self._prompts[choice.prompt_index]
        text = self._echoes[choice.prompt_index]
        offsets = token_offsets(prompt, self._tokenizer, text, skip_special_tokens=self._body.skip_special_tokens)
        for token_id, entry, offset in zip(prompt.ids, choice.prompt_logprobs, offsets, strict=True):
            logprobs.add(token_id, entry, offset)

    def _choice(
        self, choice: Choice, delta: TextDelta, logprobs: LegacyLogprobs | None, *, with_prompt_ids: bool
    ) -> dict[str, Any]:
        if logprobs is not None:
            for placed in delta.logprobs:
                logprobs.add(placed.entry.token_id, placed.entry, placed.offset)
        data = {
            "index": choice.index,
            "text": delta.text,
            "logprobs": None if logprobs is None else logprobs.as_json(),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            data["token_ids"] = delta.token_ids
            if with_prompt_ids:
                data["prompt_token_ids"] = list(choice.request.prompt_ids)
        return data
