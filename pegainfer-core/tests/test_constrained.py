"""Structured output and thinking budgets in the engine: what is generated, and that nothing else changes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from pegainfer_core import structured
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.structured import Grammar, LarkBuilder, Thinking, calls_expression
from pegainfer_core.testing.engine_driver import EngineDriver, Generated
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, PAD_ID, START_ID
from pegainfer_core.tokenizer import Tokenizer, load_tokenizer
from pegainfer_qwen3.testing import write_tiny_qwen3

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
OPEN, CLOSE = 400, 401
"""Ordinary tokens that stand for the marks of thinking."""
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "run-ahead"])
def driver(checkpoint: Path, request: pytest.FixtureRequest) -> EngineDriver:
    return EngineDriver(checkpoint, run_ahead=request.param)


def bias(ids: Sequence[int], value: float = 100.0) -> dict[int, float]:
    return dict.fromkeys(ids, value)


def one(driver: EngineDriver, **fields: object) -> Generated:
    params = {"temperature": 0.0, "max_tokens": 300, **fields}
    return driver.generate([PROMPT], SamplingParams(**params))[0]  # type: ignore[arg-type]


# what is generated


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (structured.regex("[0-9]{3}-[a-f]{1,4}z"), "[0-9]{3}-[a-f]{1,4}z"),
        (structured.choice(["yes", 'no"\\\n/', "vielleicht \u00e4"]), 'yes|no"\\\\\\n/|vielleicht \u00e4'),
        (structured.lark('start: "<" NAME ">"\nNAME: /[a-z]{1,9}/'), "<[a-z]{1,9}>"),
        (structured.lark('root ::= "x" [0-9] [0-9] "y"'), "x[0-9][0-9]y"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_the_answer_is_a_text_of_the_grammar(
    driver: EngineDriver, tokenizer: Tokenizer, grammar: Grammar, pattern: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60, grammar=grammar)
    for generated in driver.generate([PROMPT, [100, 101], [9]], params):
        assert generated.finish_reason == "stop"
        assert re.fullmatch(pattern, tokenizer.decode(generated.token_ids))


def test_a46_whitespace_between_the_parts_of_a_json_text_is_bounded(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    blank = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).isspace()]
    assert len(blank) > 3
    generated = one(driver, grammar=structured.json_schema(SCHEMA), logit_bias=bias(blank))
    text = tokenizer.decode(generated.token_ids)
    assert generated.finish_reason == "stop" and set(json.loads(text)) == {"ok", "kind"}
    assert max(map(len, re.findall(r"\s+", text))) == 41  # a new line and its indentation


def test_a46_any_json_object_begins_and_ends_as_one(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    blank = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).isspace()]
    brace = tokenizer.encode("}")[0]
    generated = one(driver, grammar=structured.json_object(), logit_bias=bias(blank) | bias([brace], 90.0))
    assert generated.finish_reason == "stop" and json.loads(tokenizer.decode(generated.token_ids)) == {}


# the end


def test_a47_no_end_id_is_allowed_before_the_answer_is_whole(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    ends = [EOS_ID, PAD_ID, START_ID, tokenizer.encode("tr")[0]]
    generated = one(driver, grammar=structured.json_schema(SCHEMA), logit_bias=bias(ends), stop_token_ids=(PAD_ID,))
    assert generated.finish_reason == "stop"
    assert set(json.loads(tokenizer.decode(generated.token_ids))) == {"ok", "kind"}


def test_a47_where_the_answer_may_end_only_end_ids_and_what_continues_it_are_allowed(
    driver: EngineDriver, tokenizer: Tokenizer
) -> None:
    grammar, likes_ends = structured.regex("(ab){2,}"), bias([EOS_ID, PAD_ID])
    assert tokenizer.decode(one(driver, grammar=grammar, logit_bias=likes_ends).token_ids) == "abab"
    longer = one(driver, grammar=grammar, logit_bias=likes_ends, min_tokens=9)
    assert len(longer.token_ids) >= 9 and longer.finish_reason == "stop"
    assert re.fullmatch("(ab)+", tokenizer.decode(longer.token_ids))
    endless = one(driver, grammar=grammar, logit_bias=likes_ends, ignore_eos=True)
    assert endless.finish_reason == "length" and len(endless.token_ids) == 300


def test_a47_a_whole_answer_ends_whatever_min_tokens_and_ignore_eos_say(
    driver: EngineDriver, tokenizer: Tokenizer
) -> None:
    for fields in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        generated = one(driver, grammar=structured.choice(["ja", "nein"]), **fields)
        assert generated.finish_reason == "stop"
        assert tokenizer.decode(generated.token_ids) in ("ja", "nein")


def test_a_stop_id_that_alone_could_go_on_ends_the_request(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("q")
    generated = one(driver, grammar=structured.regex("xq!"), stop_token_ids=(letter,))
    assert generated.finish_reason == "stop" and tokenizer.decode(generated.token_ids) == "x"


# thinking


def test_a45_thinking_is_free_and_the_answer_is_bound(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    thinking = Thinking(end_id=CLOSE, open=True, budget=7)
    generated = one(driver, grammar=structured.json_schema(SCHEMA), thinking=thinking, logit_bias=bias([EOS_ID]))
    free = one(driver, max_tokens=7, logit_bias=bias([EOS_ID], -100.0))
    assert generated.token_ids[:7] == free.token_ids, "EOS is not allowed before there is an answer; all else is"
    assert generated.token_ids[7] == CLOSE
    assert set(json.loads(tokenizer.decode(generated.token_ids[8:]))) == {"ok", "kind"}


def test_a45_without_thinking_the_first_token_is_bound(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    """The model may begin to think, if the prompt lets it, by the one token that does."""
    grammar, thinking = structured.json_schema(SCHEMA), Thinking(end_id=CLOSE, start_id=OPEN, budget=3)
    for fields in ({}, {"thinking": thinking, "logit_bias": bias([OPEN], -100.0)}):
        answer = one(driver, grammar=grammar, **fields)
        assert set(json.loads(tokenizer.decode(answer.token_ids))) == {"ok", "kind"}
    thinks = one(driver, grammar=grammar, thinking=thinking, logit_bias=bias([OPEN]))
    assert thinks.token_ids[0] == OPEN and thinks.token_ids[4] == CLOSE
    assert set(json.loads(tokenizer.decode(thinks.token_ids[5:]))) == {"ok", "kind"}


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_a_thinking_budget_forces_the_end_of_thinking(driver: EngineDriver, budget: int) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "logit_bias": bias([CLOSE], -100.0)}
    free = one(driver, **fields)
    bound = one(driver, **fields, thinking=Thinking(end_id=CLOSE, open=True, budget=budget))
    assert bound.token_ids[: budget + 1] == [*free.token_ids[:budget], CLOSE]
    assert CLOSE not in bound.token_ids[budget + 1 :] and len(bound.token_ids) == 12


def test_thinking_that_ends_by_itself_is_not_ended_again(driver: EngineDriver) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True}
    free = one(driver, **fields)
    thinking = Thinking(end_id=free.token_ids[3], open=True, budget=5)
    assert one(driver, **fields, thinking=thinking).token_ids == free.token_ids


# with everything else


def mixed(tokenizer: Tokenizer) -> list[tuple[list[int], SamplingParams]]:
    """Free, constrained, penalised and thinking requests, greedy and drawn, with short and long prompts."""
    schema, long = structured.json_schema(SCHEMA), list(range(20, 65))
    thinking = Thinking(end_id=CLOSE, open=True, budget=4)
    greedy = {"temperature": 0.0, "max_tokens": 60, "logprobs": 1}
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 60, "top_p": 0.95, "logprobs": 1}
    penalties = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    fields = [
        (PROMPT, greedy),
        (long, greedy | {"grammar": schema}),
        (long, drawn | {"grammar": schema} | penalties),
        ([9, 8], drawn | penalties),
        ([9, 8], greedy | {"grammar": structured.regex("[a-d]{30}")}),
        ([3], greedy | {"thinking": thinking, "ignore_eos": True}),
        ([3, 4], drawn | {"thinking": thinking, "grammar": schema, "logit_bias": bias([90, 91], 2.0)}),
        ([11] * 30, drawn),
    ]
    return [(prompt, SamplingParams(**each)) for prompt, each in fields]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tokenizer: Tokenizer) -> list[Generated]:
    driver = EngineDriver(checkpoint, run_ahead=False)
    return [driver.generate_each([request])[0] for request in mixed(tokenizer)]


@pytest.mark.parametrize(
    "settings",
    [
        {"run_ahead": True},
        {"run_ahead": True, "max_prefill_tokens": 5, "max_running_requests": 3},
        {"run_ahead": True, "kv_cache_memory": 11 * 16 * 4 * 2 * 2 * 32 * 4, "max_model_len": 128},
        {
            "run_ahead": False,
            "kv_cache_memory": 11 * 16 * 4 * 2 * 2 * 32 * 4,
            "max_model_len": 128,
            "prefix_cache": False,
        },
    ],
    ids=["run-ahead", "chunks", "preempted, run-ahead", "preempted"],
)
def test_together_they_give_the_same_as_alone(
    checkpoint: Path, tokenizer: Tokenizer, alone: list[Generated], settings: dict[str, object]
) -> None:
    driver = EngineDriver(checkpoint, **settings)
    together = driver.generate_each(mixed(tokenizer))
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [each.finish_reason for each in together] == [each.finish_reason for each in alone]
    assert (driver.stats.preemptions > 0) == ("kv_cache_memory" in settings)


def test_d10_logprobs_are_those_of_the_model_and_finite(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    free = one(driver, logprobs=3, max_tokens=1)
    bound = one(driver, logprobs=3, max_tokens=1, grammar=structured.choice(["Z"]))
    assert bound.logprobs[0].top == free.logprobs[0].top, "of all tokens, allowed or not"
    assert bound.logprobs[0].rank > 1 and bound.logprobs[0].logprob < free.logprobs[0].logprob


# forced tool calls


def test_forced_calls_name_a_tool_and_fit_its_schema(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    tools: dict[str, dict[str, object]] = {
        "look": SCHEMA,
        "go": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}},
    }

    def grammar(names: Sequence[str], *, parallel: bool) -> Grammar:
        builder = LarkBuilder()
        calls = [
            builder.sequence(
                builder.token(START_ID),
                builder.text(f'{{"name": "{name}", "arguments": '),
                builder.json(tools[name]),
                builder.text("}\n</call>"),
            )
            for name in names
        ]
        return builder.build(calls_expression(builder, calls, parallel=parallel, separator="\n"))

    call = r'{"name": "(look|go)", "arguments": ({.*?})}\n</call>'
    params = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": False}
    for seed in range(2):
        fields = params | {"seed": seed}
        single = one(driver, **fields, grammar=grammar(["look"], parallel=False))
        assert single.finish_reason == "stop" and single.token_ids[0] == START_ID
        found = re.fullmatch(call, tokenizer.decode(single.token_ids, skip_special_tokens=True), re.S)
        assert found is not None and found[1] == "look" and set(json.loads(found[2])) == {"ok", "kind"}
        many = one(driver, **fields, grammar=grammar(list(tools), parallel=True), logit_bias=bias([EOS_ID], 3.0))
        if many.finish_reason == "stop":
            text = tokenizer.decode(many.token_ids, skip_special_tokens=True)
            assert re.fullmatch(rf"{call}(\n{call})*", text, re.S)
