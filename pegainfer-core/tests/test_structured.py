"""The specification of structured output: what it refuses, and that it crosses the wire."""

from __future__ import annotations

import msgspec
import pytest
from pegainfer_core import structured
from pegainfer_core.errors import RequestError
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.structured import Grammar, Thinking


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "json_schema", "text": "{"}, "not valid JSON"),
        ({"kind": "json_schema", "text": "[" * 100_000}, "not valid JSON"),
        ({"kind": "json_schema", "text": "[]"}, "a JSON schema is an object"),
        ({"kind": "json_schema", "text": '"' + "a" * structured.MAX_GRAMMAR_LENGTH + '"'}, "at most"),
        ({"kind": "choice", "text": "[]"}, "choices are a list of strings"),
        ({"kind": "choice", "text": '["a", ""]'}, "choices are a list of strings"),
        ({"kind": "choice", "text": '["a", 1]'}, "choices are a list of strings"),
        ({"kind": "choice", "text": "[" + '"a",' * structured.MAX_CHOICES + '"a"]'}, "choices are supported"),
        ({"kind": "regex", "text": ""}, "empty"),
        ({"kind": "lark", "text": ""}, "empty"),
    ],
)
def test_a_text_that_is_not_of_its_kind_is_refused_by_field(fields: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        Grammar(**fields, field="guided_x")  # type: ignore[arg-type]
    assert caught.value.param == "guided_x" and str(caught.value).startswith("guided_x: ")


def test_sampling_parameters_carry_it_over_the_wire() -> None:
    params = SamplingParams(
        grammar=structured.json_schema({"type": "object"}, strict=False, field="response_format"),
        thinking=Thinking(end_id=5, start_id=4, budget=10),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert hash(params.grammar) == hash(
        structured.json_schema({"type": "object"}, strict=False, field="response_format")
    )


def test_thinking_needs_a_beginning_and_no_negative_budget() -> None:
    with pytest.raises(RequestError, match="begins it"):
        Thinking(end_id=5)
    with pytest.raises(RequestError, match="thinking_budget must be 0 or more"):
        Thinking(end_id=5, open=True, budget=-1)
