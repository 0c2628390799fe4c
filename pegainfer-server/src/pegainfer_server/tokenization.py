"""POST /tokenize and /detokenize: what the generation routes would do with a prompt or messages, without the engine."""

from __future__ import annotations

from fastapi import APIRouter
from pegainfer_core.messages import EngineInfo
from pegainfer_core.tokenizer import Tokenizer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pegainfer_server.body import read_body
from pegainfer_server.chat_prompt import encode_chat
from pegainfer_server.chat_tools import read_tools
from pegainfer_server.http_errors import bad_request
from pegainfer_server.logprobs import TokenWriter
from pegainfer_server.openapi import body_docs
from pegainfer_server.prompts import check_ids, encode_text, off_loop
from pegainfer_server.protocol import DetokenizeBody, TokenizeBody
from pegainfer_server.state import ServerState
from pegainfer_server.system import served_name


def router(state: ServerState) -> APIRouter:
    """The routes, for `create_app`."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=body_docs(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        info, tokenizer = state.serving()
        body = await read_body(request, TokenizeBody, state.max_body_bytes)
        served_name(state, body.model)
        ids = await _ids(body, state, info, tokenizer)
        strings = None
        if body.return_token_strs:
            writer = TokenWriter(tokenizer, as_ids=False)
            strings = [writer.text(token_id) for token_id in ids]
        return JSONResponse(
            {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}
        )

    @routes.post("/detokenize", openapi_extra=body_docs(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Text of token ids, special tokens included."""
        info, tokenizer = state.serving()
        body = await read_body(request, DetokenizeBody, state.max_body_bytes)
        served_name(state, body.model)
        if body.tokens:
            check_ids(body.tokens, info.vocab_size, "tokens")
        text = await off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens))
        return JSONResponse({"prompt": text})

    return routes


async def _ids(body: TokenizeBody, state: ServerState, info: EngineInfo, tokenizer: Tokenizer) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: give either prompt or messages", "prompt", "missing_field")
    if body.prompt is not None:
        if (
            body.add_generation_prompt is not None
            or body.continue_final_message
            or body.chat_template_kwargs
            or body.tools
        ):
            raise bad_request(
                "prompt: add_generation_prompt, continue_final_message, chat_template_kwargs and tools go with messages",
                "prompt",
            )
        prompt = body.prompt
        special = body.add_special_tokens is not False
        return await off_loop(len(prompt), lambda: encode_text(prompt, tokenizer, info, add_special_tokens=special))
    if body.add_special_tokens:
        raise bad_request(
            "add_special_tokens: a chat template writes its own", "add_special_tokens", "unsupported_field"
        )
    calls = None if state.chat_format is None or state.chat_format.syntax is None else state.chat_format.syntax.calls
    use = read_tools(body.tools, None, parallel=True, syntax=calls)
    return (
        await encode_chat(
            body, state.chat_format, tokenizer, info, use.shown, trust_template=state.trust_request_chat_template
        )
    ).ids
