"""POST /v1/chat/completions: messages in, one assistant message per choice out.

Owns the request's meaning and the shape of its choices. Tool calls and reasoning are not parsed yet: asking for tools is an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from pegainfer_core.messages import AddRequest, pack_ids
from pegainfer_core.tokenizer import Detokenizer, Tokenizer
from starlette.requests import Request
from starlette.responses import Response

from pegainfer_server.answer import Answer, Shape, new_id
from pegainfer_server.body import read_body
from pegainfer_server.chat_prompt import encode_chat
from pegainfer_server.generation import Choice
from pegainfer_server.http_errors import bad_request
from pegainfer_server.logprobs import TokenWriter
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.openapi import body_docs
from pegainfer_server.protocol import ChatBody
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


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The route, for `create_app`."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_docs(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.perf_counter()
        info, tokenizer = state.serving()
        body = await read_body(request, ChatBody, state.max_body_bytes)
        model = served_name(state, body.model)
        _check(body)
        params = sampling_params(
            body,
            state.default_sampling,
            info,
            logprobs=_num_logprobs(body),
            prompt_logprobs=body.prompt_logprobs,
            grammar=body.grammar(),
        )
        ids = pack_ids(await encode_chat(body, state.chat_format, tokenizer, info))
        max_tokens = clamp_max_tokens(requested_max_tokens(body, state.default_sampling), len(ids), info)
        further = msgspec.structs.replace(params, prompt_logprobs=None)  # of the prompt they share, once is enough
        response_id = new_id(ChatShape)
        shape = ChatShape(body, tokenizer)
        requests = [
            AddRequest(
                f"{response_id}-{k}",
                ids,
                for_choice(params if k == 0 else further, max_tokens=max_tokens, choice=k),
                body.cache_salt,
                body.queue_priority,
            )
            for k in range(body.n)
        ]
        metrics.observe("request_params_n", body.n)
        choices = [
            Choice(index, 0, item, shape.text_stream(), metrics.recorder(arrival, item), body.caller)
            for index, item in enumerate(requests)
        ]
        return await Answer(response_id, model, body, shape, choices, state.client, arrival).respond(request)

    return routes


def _check(body: ChatBody) -> None:
    if body.tools not in (None, []):
        raise unsupported("tools", "tool calls are not supported yet")
    if body.tool_choice not in (None, "none"):
        raise unsupported("tool_choice", 'tool calls are not supported yet; only "none" is')
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs", "invalid_value")
    check_prompt_logprobs(body)
    if requested_max_tokens(body) == 0:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise bad_request(f"{name}: must be at least 1", name, "invalid_value")


def _num_logprobs(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatShape(Shape):
    """Choices of chat completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._writer = TokenWriter(tokenizer, as_ids=body.return_tokens_as_token_ids)

    def text_stream(self) -> TextStream:
        """The text stream of one choice."""
        body = self._body
        return TextStream(
            Detokenizer(
                self._tokenizer,
                skip_special_tokens=body.skip_special_tokens,
                continues=body.continue_final_message,
            ),
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
        )

    @property
    def text_only(self) -> bool:
        """See Shape."""
        return not self._body.logprobs and not self._body.return_token_ids

    def whole(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """See Shape."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        data = {"index": choice.index, "message": message, "logprobs": self._logprobs(delta)}
        return data | self._ending(delta) | self._ids(delta, choice)

    def beside(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See Shape: the prompt's logprobs, which all choices share."""
        entries = choices[0].prompt_logprobs
        if entries is None or self._body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self._writer.prompt_entries(entries, self._body.prompt_logprobs)}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """See Shape."""
        nothing = TextDelta()
        data = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return data | self._ending(nothing) | self._ids(nothing, choice)

    def chunks(self, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        """See Shape. The finish reason comes in a chunk of its own, with an empty delta."""
        result = []
        if delta.finish_reason is None or delta.text or delta.logprobs or delta.token_ids:
            text_only = TextDelta(text=delta.text, token_ids=delta.token_ids, logprobs=delta.logprobs)
            data = {"index": choice.index, "delta": {"content": delta.text}, "logprobs": self._logprobs(delta)}
            result.append(data | self._ending(text_only) | self._ids(text_only))
        if delta.finish_reason is not None:
            result.append({"index": choice.index, "delta": {}, "logprobs": None} | self._ending(delta))
        return result

    def _ending(self, delta: TextDelta) -> dict[str, Any]:
        return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _ids(self, delta: TextDelta, with_prompt_of: Choice | None = None) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": delta.token_ids}
        if with_prompt_of is not None:
            ids["prompt_token_ids"] = list(with_prompt_of.request.prompt_ids)
        return ids

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [self._writer.chat_entry(placed.entry) for placed in delta.logprobs], "refusal": None}
