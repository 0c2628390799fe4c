"""/openapi.json is true: schemathesis derives requests from it, right and wrong ones, for a real server.

No answer is a 5xx, and every status, content type and error body is a described one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pegainfer_core.testing.served import served
from pegainfer_qwen3.testing import write_tiny_qwen3
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = 40
"""Requests for each operation and each of the two kinds, valid and invalid."""
CANARY = {"prompt": "The canary sings", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small real server. Short contexts keep the answers short."""
    model = write_tiny_qwen3(tmp_path_factory.mktemp("openapi") / "tiny")
    with served(model, "--max-model-len", "128", "--kv-cache-memory", "16MiB") as server:
        yield server.url


def operations(url: str) -> Iterator[Any]:
    """Every operation of the description that the server gives."""
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        assert isinstance(result, Ok), result
        yield result.ok()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_f15_every_answer_is_a_described_one(url: str, mode: GenerationMode) -> None:
    """Two runs: requests that fit the description, and requests that do not."""
    seen: dict[str, Counter[int]] = {}
    for operation in operations(url):
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # there is nothing to get wrong

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case[Any]) -> None:
            answer = case.call_and_validate(checks=CHECKS, timeout=60)
            seen.setdefault(case.operation.label, Counter())[answer.status_code] += 1

        check()
    assert {"POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize"} <= seen.keys()
    for label, statuses in seen.items():
        if label.startswith("POST"):  # random bodies with all their fields seldom fit together
            assert 400 in statuses, label
    if mode is GenerationMode.POSITIVE:
        assert {"POST /v1/completions", "POST /detokenize"} <= {label for label, found in seen.items() if 200 in found}


def test_f15_hostile_values_in_all_fields_leave_the_canary_and_the_engine_as_they_were(url: str) -> None:
    """The short version of a run that CONTRIBUTING.md describes."""
    command = [sys.executable, str(ROOT / "benchmarks" / "fuzz.py"), "--url", url, "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["faults"] == [] and facts["canaries"] > 1
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= set(facts["answered_200"])


def test_f15_the_canary_sings_on(url: str) -> None:
    """After all of the above: the engine lives, gives everything back, and a greedy text is what a fresh server gives."""
    text = httpx.post(f"{url}/v1/completions", json=CANARY, timeout=60).json()["choices"][0]["text"]
    again = httpx.post(f"{url}/v1/completions", json={**CANARY, "cache_salt": "cold"}, timeout=60).json()
    assert text and again["choices"][0]["text"] == text
    assert httpx.get(f"{url}/readyz").json() == {"status": "ok"}
