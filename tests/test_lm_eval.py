"""lm-evaluation-harness, unmodified, against a real server on SmolLM2: `lm_eval --model local-completions` (A5, A21, A56).

Its log-likelihoods are compared with transformers', so that a score that is right by luck is not enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.testing.reference import transformers_logits
from pegainfer_core.testing.served import served
from pegainfer_core.tokenizer import load_tokenizer
from pegainfer_llama.smollm2 import ensure_checkpoint

CHOICES = ["Paris", "Rome", "Madrid", "Athens"]
COUNTRIES = ["France", "Italy", "Spain", "Greece"]
CAPITALS = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: what is the capital of {{country}}?\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
LINES = """
task: lines
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
generation_kwargs: {until: ["\\n", "Question:"], max_gen_toks: 12, temperature: 0}
doc_to_text: "Question: what is the capital of {{country}}?\\nAnswer: The capital of {{country}} is"
doc_to_target: "{{choices[answer]}}"
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the harness logged, by task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "capitals.jsonl"
    rows = [{"country": country, "choices": CHOICES, "answer": index} for index, country in enumerate(COUNTRIES)]
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    for name, text in (("capitals", CAPITALS), ("lines", LINES)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)), encoding="utf-8")
    checkpoint = ensure_checkpoint()
    with served(checkpoint, "--dtype", "float32") as server:
        evaluate(folder, f"model=test,base_url={server.url}/v1/completions,tokenizer={checkpoint},num_concurrent=4")
    logs = {name: next(folder.glob(f"out/**/samples_{name}_*.jsonl")) for name in ("capitals", "lines")}
    return {name: [json.loads(line) for line in log.read_text().splitlines()] for name, log in logs.items()}


def evaluate(folder: Path, model: str) -> None:
    """Run the harness as a user would; it reads and writes in `folder` only."""
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "capitals,lines", "--include_path", str(folder), "--output_path", str(folder / "out")]
    command += ["--log_samples", "--batch_size", "4"]
    result = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def test_log_likelihoods_are_those_of_transformers(samples: dict[str, list[dict[str, Any]]]) -> None:
    checkpoint = ensure_checkpoint()
    tokenizer = load_tokenizer(checkpoint)
    asked = [pair for sample in samples["capitals"] for pair in arguments(sample)]
    told = [float(answer[0][0]) for sample in samples["capitals"] for answer in sample["resps"]]
    assert len(asked) == len(told) == 16
    contexts = [tokenizer.encode(context) for context, _ in asked]
    wholes = [tokenizer.encode(context + continuation) for context, continuation in asked]
    for context, whole, value, logits in zip(
        contexts, wholes, told, transformers_logits(checkpoint, wholes), strict=True
    ):
        rows = logits.double().log_softmax(-1)[range(len(whole) - 1), whole[1:]]
        assert value == pytest.approx(float(rows[len(context) - 1 :].sum()), abs=1e-3)
    assert sum(sample["acc"] for sample in samples["capitals"]) >= 3


def arguments(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) of each request of a sample."""
    return [(one["arg_0"], one["arg_1"]) for one in sample["arguments"].values()]


def test_generation_stops_where_the_task_says(samples: dict[str, list[dict[str, Any]]]) -> None:
    texts = [sample["resps"][0][0] for sample in samples["lines"]]
    assert len(texts) == 4
    assert all("\n" not in text and "Question:" not in text for text in texts)
    assert sum(capital in text for capital, text in zip(CHOICES, texts, strict=True)) >= 3
