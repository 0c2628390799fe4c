"""Whatever JSON a client sends: an answer or a 400 naming a field, never a failure, and the engine gets valid requests only."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegainfer_core.messages import TO_ENGINE_DECODER, TO_ENGINE_ENCODER, AddRequest
from pegainfer_server.messages_api.body import MessagesBody
from pegainfer_server.protocol import ChatBody, CompletionBody, TokenizeBody
from pegainfer_server.responses.body import ResponsesBody

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, -1, 128, 511, 512, 2**31, 2**63, 2**64, 10**40])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "1", "<|im_end|>", "\x00", "\U0001f389"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text(max_size=8) | VALUES},
        optional={"name": VALUES, "tool_calls": VALUES, "reasoning_content": VALUES},
    ),
    max_size=3,
)


def bodies(fields: Any, **usual: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are right but for a few random fields."""
    wild = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3)
    return st.fixed_dictionaries(usual).flatmap(lambda base: wild.map(lambda extra: {**base, **extra}))


COMPLETIONS = bodies(
    CompletionBody.model_fields,
    prompt=st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 511), min_size=1, max_size=9),
)
CHATS = bodies(ChatBody.model_fields, messages=MESSAGES)
BLOCKS = st.text(max_size=8) | st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["text", "input_text", "output_text", "tool_use", "tool_result", "thinking"])
            | VALUES
        },
        optional={
            name: st.text(max_size=8) | VALUES for name in ("text", "thinking", "id", "name", "input", "content")
        },
    ),
    max_size=3,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | VALUES,
            "role": st.sampled_from(["user", "assistant", "developer"]),
            "content": BLOCKS | VALUES,
            "output": BLOCKS | VALUES,
            **{name: st.text(max_size=8) | VALUES for name in ("call_id", "name", "arguments", "encrypted_content")},
        },
    ),
    max_size=4,
)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": BLOCKS}), max_size=3)
RESPONSES = bodies(ResponsesBody.model_fields, input=st.text(max_size=20) | ITEMS)
ANTHROPIC = bodies(MessagesBody.model_fields, messages=TURNS, max_tokens=st.just(4))
TOKENIZE = bodies(TokenizeBody.model_fields, prompt=st.text(max_size=9))
REQUESTS = (
    st.tuples(st.just("/v1/completions"), COMPLETIONS)
    | st.tuples(st.just("/v1/chat/completions"), CHATS)
    | st.tuples(st.just("/v1/responses"), RESPONSES)
    | st.tuples(st.just("/v1/messages"), ANTHROPIC)
    | st.tuples(st.just("/tokenize"), TOKENIZE)
    | st.tuples(st.just("/detokenize"), st.fixed_dictionaries({"tokens": VALUES}))
)
LIMIT = {"max_examples": 300, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(**LIMIT)  # type: ignore[arg-type]
@given(REQUESTS)
async def test_any_body(served: Any, request_: tuple[str, dict[str, Any]]) -> None:
    path, body = request_
    served.engine.received.clear()
    response = await served.http.post(path, content=msgspec.json.encode(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert len(error["message"]) < 500
        assert served.engine.received == []
    for request in served.engine.requests:
        decoded = TO_ENGINE_DECODER.decode(TO_ENGINE_ENCODER.encode(request))
        assert isinstance(decoded, AddRequest)
        assert msgspec.structs.replace(decoded, prompt_ids=list(decoded.prompt_ids)) == request  # it can cross the wire
        assert 1 <= len(request.prompt_ids) + request.params.max_tokens <= 128
        assert all(0 <= token_id < 512 for token_id in request.prompt_ids)
    assert served.engine.num_open == 0
