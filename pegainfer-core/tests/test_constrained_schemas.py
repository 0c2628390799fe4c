"""200 schemas, made at random, and a model with random weights: whatever ends by itself validates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pegainfer_core import structured
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.testing.engine_driver import EngineDriver
from pegainfer_core.tokenizer import load_tokenizer
from pegainfer_qwen3.testing import write_tiny_qwen3

NUM_SCHEMAS = 200
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")


def random_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """A schema that uses what a user of structured output does: types, bounds, patterns, references, unions."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = draw.choice(leaves if depth == 0 else [*leaves, *["object"] * 5, *["array"] * 3, "anyOf", "ref", "map"])
    low = draw.randint(-50, 50)
    made: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 9)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)},
        "number": {"type": ["number", "null"], "exclusiveMinimum": low, "maximum": low + 7.5},
        "boolean": {"type": "boolean", "description": "whether", "default": True},
        "null": {"type": "null"},
        "enum": {"enum": ["a", 'q"', 3, None, [1, {"x": False}]]},
        "const": {"const": {"k": draw.randint(0, 9)}},
        "pattern": {"type": "string", "pattern": draw.choice(["^[a-c]{2,4}$", "^\\d+-x?$", "[A-Z]z$"])},
        "format": {"type": "string", "format": draw.choice(FORMATS)},
    }
    if kind in made:
        return made[kind]

    def inner() -> dict[str, Any]:
        return random_schema(draw, depth - 1)

    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": draw.randint(0, 2), "maxItems": draw.randint(2, 4)}
    if kind == "anyOf":
        return {"anyOf": [inner(), inner()]}
    if kind == "map":
        return {"type": "object", "additionalProperties": inner(), "minProperties": 1, "maxProperties": 3}
    if kind == "ref":
        return {"$ref": "#/$defs/shared"}
    names = draw.sample(["name", "id", "a b", "\u00e4", "list", 'q"', "x"], draw.randint(1, 4))
    required = [name for name in names if draw.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: inner() for name in names},
        "required": required,
        "additionalProperties": False,
    }


def root_schema(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    shared = {"type": "object", "properties": {"next": {"$ref": "#/$defs/shared"}, "v": {"type": "integer"}}}
    return {**random_schema(draw, depth=3), "$defs": {"shared": shared | {"additionalProperties": False}}}


def test_judged_line_6_what_ends_by_itself_validates(tmp_path: Path) -> None:
    checkpoint = write_tiny_qwen3(tmp_path)
    tokenizer = load_tokenizer(checkpoint)
    driver = EngineDriver(checkpoint, run_ahead=True)
    schemas = [root_schema(seed) for seed in range(NUM_SCHEMAS)]
    requests = [
        (
            [5, 6, 7 + seed],
            SamplingParams(temperature=1.0, seed=seed, max_tokens=96, grammar=structured.json_schema(schema)),
        )
        for seed, schema in enumerate(schemas)
    ]
    whole = 0
    for schema, generated in zip(schemas, driver.generate_each(requests), strict=True):
        text = tokenizer.decode(generated.token_ids)
        if generated.finish_reason == "length":
            continue
        assert generated.finish_reason == "stop"
        whole += 1
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    assert whole >= NUM_SCHEMAS // 2, "enough of them end by themselves for the test to mean something"


@pytest.mark.parametrize("seed", range(3))
def test_the_schemas_differ_and_are_valid(seed: int) -> None:
    Draft202012Validator.check_schema(root_schema(seed))
    assert root_schema(seed) != root_schema(seed + 1)
