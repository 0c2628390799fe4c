"""Structured output and thinking budgets on a GPU: captured graphs and run-ahead change no token, and what is bound is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.structured import Thinking, json_schema, regex
from pegainfer_core.testing.engine_driver import EngineDriver, Generated
from pegainfer_core.tokenizer import load_tokenizer
from pegainfer_qwen3.testing import write_tiny_qwen3

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
CLOSE = 401


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 60}
THINKING = Thinking(end_id=CLOSE, open=True, budget=4)
PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "frequency_penalty": 0.2}

Fields = list[tuple[list[int], dict[str, Any]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def generate(checkpoint: Path, fields: Fields, **settings: Any) -> list[Generated]:
    chosen: dict[str, Any] = {"device": "cuda", "kv_cache_memory": 1 << 26, "max_running_requests": 8}
    driver = EngineDriver(checkpoint, **(chosen | {"max_model_len": 512} | settings))
    return driver.generate_each([(prompt, SamplingParams(**each)) for prompt, each in fields])


def check_all_settings(checkpoint: Path, fields: Fields) -> list[Generated]:
    """What plain steps give, and every other way of running them."""
    plain = generate(checkpoint, fields, run_ahead=False, cuda_graphs=False)
    for settings in ({"run_ahead": True}, {"run_ahead": True, "cuda_graphs": False}, {"run_ahead": False}):
        found = generate(checkpoint, fields, **settings)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    return plain


def test_graphs_and_run_ahead_change_no_penalised_and_no_thinking_row(checkpoint: Path) -> None:
    fields: Fields = [
        ([9, 8, 7], GREEDY | PENALTIES | {"ignore_eos": True}),
        (list(range(20, 65)), DRAWN | PENALTIES | {"ignore_eos": True}),
        ([3], GREEDY | {"thinking": THINKING, "ignore_eos": True}),
        ([3, 4], DRAWN | {"thinking": THINKING, "min_tokens": 9}),
        ([11] * 30, GREEDY | {"ignore_eos": True}),
    ]
    plain = check_all_settings(checkpoint, fields)
    assert plain[2].token_ids[4] == plain[3].token_ids[4] == CLOSE


def test_graphs_and_run_ahead_change_no_bound_row(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    schema = json_schema(SCHEMA)
    fields: Fields = [
        ([5, 6, 7], DRAWN | {"grammar": schema}),
        (list(range(20, 65)), DRAWN | {"grammar": schema, "presence_penalty": 0.5}),
        ([3, 4], DRAWN | {"grammar": schema, "thinking": THINKING}),
        ([9, 8], GREEDY | {"grammar": regex("[a-d]{30}")}),
        ([11] * 30, GREEDY | {"ignore_eos": True}),
    ]
    plain = check_all_settings(checkpoint, fields)
    assert [each.finish_reason for each in plain[:4]] == ["stop"] * 4
    assert plain[2].token_ids[4] == CLOSE
    for token_ids in (plain[0].token_ids, plain[1].token_ids, plain[2].token_ids[5:]):
        assert set(json.loads(tokenizer.decode(token_ids))) == {"ok", "kind"}
