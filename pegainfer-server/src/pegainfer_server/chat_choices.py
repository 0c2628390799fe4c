"""A chat request's choices: from a checked body to engine requests and the streams that read their answers.

Owns what a chat request means, for every API that has chats: the routes translate into a `ChatBody` and word the events of the choices'
deltas. Knows no response shapes.
"""

from __future__ import annotations

import msgspec
from pegainfer_core.chat_syntax import AnswerParser, ChatSyntax, ParserSettings
from pegainfer_core.messages import AddRequest, pack_ids
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.structured import Thinking
from pegainfer_core.tokenizer import Detokenizer, Tokenizer

from pegainfer_server.answer_stream import AnswerStream, StopRules
from pegainfer_server.chat_prompt import ChatPrompt, encode_chat
from pegainfer_server.chat_tools import ToolUse, read_tools
from pegainfer_server.generation import Choice, OutputReader
from pegainfer_server.http_errors import bad_request
from pegainfer_server.metrics import ServerMetrics
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
from pegainfer_server.text_stream import TextStream


async def chat_choices(
    body: ChatBody, state: ServerState, metrics: ServerMetrics, response_id: str, arrival: float
) -> list[Choice]:
    """The choices, not yet sent to the engine. Raises ApiError or RequestError naming what is wrong with the request."""
    info, tokenizer = state.serving()
    _check(body)
    syntax = None if state.chat_format is None else state.chat_format.syntax
    calls = None if syntax is None else syntax.calls
    use = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, syntax=calls)
    params = sampling_params(
        body,
        state.default_sampling,
        info,
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        grammar=body.grammar(),
    )
    prompt = await encode_chat(
        body, state.chat_format, tokenizer, info, use.shown, trust_template=state.trust_request_chat_template
    )
    params = _with_syntax(params, body, use, prompt, syntax)
    ids = pack_ids(prompt.ids)
    max_tokens = clamp_max_tokens(requested_max_tokens(body, state.default_sampling), len(prompt.ids), info)
    further = msgspec.structs.replace(params, prompt_logprobs=None)  # of the prompt they share, once is enough
    choices = []
    for index in range(body.n):
        own = for_choice(params if index == 0 else further, max_tokens=max_tokens, choice=index)
        request = AddRequest(f"{response_id}-{index}", ids, own, body.cache_salt, body.queue_priority)
        reader = answer_reader(body, use, prompt, syntax, tokenizer)
        choices.append(Choice(index, 0, request, reader, metrics.recorder(arrival, request), body.caller))
    metrics.observe("request_params_n", body.n)
    return choices


def answer_reader(
    body: ChatBody, use: ToolUse, prompt: ChatPrompt, syntax: ChatSyntax | None, tokenizer: Tokenizer
) -> OutputReader:
    """What reads one choice's outputs: plain text where the answer can be nothing else."""
    thinks = syntax is not None and syntax.reasoning is not None and syntax.reasoning.anywhere
    plain = syntax is None or (prompt.start == "answer" and use.tools is None and not thinks)
    detokenizer = Detokenizer(
        tokenizer,
        skip_special_tokens=body.skip_special_tokens,
        continues=body.continue_final_message,
        marks=None if syntax is None or plain else syntax.marks.by_id,
    )
    if syntax is None or plain:
        include = body.include_stop_str_in_output
        return TextStream(detokenizer, stops=body.stop, include_stop=include, min_tokens=body.min_tokens)
    settings = ParserSettings(
        start=prompt.start,
        tools=use.tools,
        max_calls=use.max_calls,
        calls_before=prompt.num_calls,
        show_special=not body.skip_special_tokens,
    )
    rules = StopRules(
        stops=body.stop,
        include_stop=body.include_stop_str_in_output,
        in_reasoning=body.stop_in_reasoning,
        min_tokens=body.min_tokens,
        named_call=use.named,
    )
    return AnswerStream(detokenizer, AnswerParser(syntax, settings), rules)


def _with_syntax(
    params: SamplingParams, body: ChatBody, use: ToolUse, prompt: ChatPrompt, syntax: ChatSyntax | None
) -> SamplingParams:
    """What the engine must know of the syntax: forced calls, and where thinking ends if something depends on it."""
    budget = body.requested_thinking_budget
    if budget is not None and (syntax is None or syntax.reasoning is None):
        raise unsupported("thinking_budget", "this model's family does not say how it thinks")
    if syntax is not None and syntax.calls is not None and use.tools:
        grammar = use.grammar(syntax.calls, params.grammar, after_thinking=prompt.start != "answer")
        params = msgspec.structs.replace(params, grammar=grammar)
    if params.grammar is None and budget is None:
        return params
    thinking = _thinking(prompt, syntax, budget)
    return msgspec.structs.replace(params, thinking=thinking)


def _thinking(prompt: ChatPrompt, syntax: ChatSyntax | None, budget: int | None) -> Thinking | None:
    if syntax is None or syntax.reasoning is None or prompt.start == "answer":
        return None
    opened = prompt.start != "undecided"
    open_id, close_id = syntax.reasoning.open_id, syntax.reasoning.close_id
    if close_id is None or (open_id is None and not opened):
        return None
    return Thinking(end_id=close_id, start_id=open_id, open=opened, budget=budget)


def _check(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs", "invalid_value")
    check_prompt_logprobs(body)
    if requested_max_tokens(body) == 0:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise bad_request(f"{name}: must be at least 1", name, "invalid_value")


def _num_logprobs(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None
