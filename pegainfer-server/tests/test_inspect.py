"""`pegainfer inspect` finds what a start would fail with, and says it in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pegainfer_core import LLM, ConfigError
from pegainfer_core.machine import machine_memory
from pegainfer_core.testing import corrupt
from pegainfer_qwen3.testing import write_tiny_qwen3
from pegainfer_server.cli import main

NORM = "model.norm.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1503300328\n"


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def pickle_only(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def broken_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{% for message in %}")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing tensor": lambda path: corrupt.drop_tensor(path, NORM),
    "unknown tensor": lambda path: corrupt.add_tensor(path, "model.extra", beside=NORM),
    "other shape": lambda path: corrupt.reshape_tensor(path, NORM),
    "other type": lambda path: corrupt.retype_tensor(path, NORM, torch.int8),
    "cut off": lambda path: corrupt.truncate_file_of(path, NORM),
    "pickle only": pickle_only,
    "weights of Git LFS": write("model.safetensors", POINTER),
    "tokenizer of Git LFS": write("tokenizer.json", POINTER),
    "no tokenizer": lambda path: (path / "tokenizer.json").unlink(),
    "tokenizer of another kind": write("tokenizer.json", "{}"),
    "vocabulary of no kind": write("tokenizer.json", '{"model": {"vocab": "abc"}}'),
    "vocabulary of numbers": write("tokenizer.json", '{"model": {"vocab": [1, 2]}}'),
    "added tokens of no kind": write("tokenizer_config.json", '{"added_tokens_decoder": ["a"]}'),
    "added tokens without text": write("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}'),
    "template that is no jinja": broken_template,
    "absurd size": lambda path: corrupt.edit_config(path, num_hidden_layers=10**9),
    "unknown key": lambda path: corrupt.edit_config(path, nonsense=1),
    "config that is no JSON": write("config.json", "{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_with_the_files_is_told_as_at_a_start(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_qwen3(tmp_path / "model")
    DAMAGE[damage](path)
    with pytest.raises(ConfigError) as caught:
        LLM(str(path), device="cpu")
    assert main(["inspect", str(path), "--device", "cpu"]) == 1
    assert capfd.readouterr().err == f"error: {caught.value}\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 4097},
        {"max_model_len": 4096, "kv_cache_memory": 1 << 20},
        {"kv_cache_memory": 100},
        {"kv_cache_memory": machine_memory() + 1},
        {"attention_backend": "triton"},
        {"cuda_graphs": True},
        {"options": {"nonsense": "1"}},
        {"ignore_config_keys": ("nonsense",)},
        {"revision": "main"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_flags_that_cannot_be_honoured_are_told_as_at_a_start(
    checkpoint: Path, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(checkpoint), device="cpu", **settings)
    flags: list[str] = []
    for name, value in settings.items():
        if name == "options":
            flags += ["-o", "nonsense=1"]
        elif value is True:
            flags.append(f"--{name.replace('_', '-')}")
        else:
            flags += [f"--{name.replace('_', '-')}", str(value[0] if isinstance(value, tuple) else value)]
    assert main(["inspect", str(checkpoint), "--device", "cpu", *flags]) == 1
    assert capfd.readouterr().err == f"error: {caught.value}\n"


def test_a_default_that_no_request_could_use_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_qwen3(tmp_path / "model")
    for key, value, problem in (
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("top_p", 1.5, "top_p must be in (0, 1], got 1.5"),
        ("top_k", 2.5, "top_k must be a number, got 2.5"),
        ("eos_token_id", "2", "eos_token_id is '2'; it must be a token id or a list of them"),
    ):
        (path / "generation_config.json").write_text(json.dumps({key: value}))
        assert main(["inspect", str(path)]) == 1
        assert capfd.readouterr().err == f"error: generation_config.json: {problem}\n"


def test_eos_ids_that_no_token_has_are_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_qwen3(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 600, 10**6]}))
    assert main(["inspect", str(path)]) == 0
    err = capfd.readouterr().err
    assert err == "warning: eos_token_id 600, 1000000: no token has this id, so no answer can end with it\n"


def test_a_config_alone_can_be_inspected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_qwen3(tmp_path / "model")
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["tensors"] == 0 and report["layers"] == 4


def test_a_gpu_that_is_not_here_can_be_asked_about(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = str(1 << 50)
    assert main(["inspect", str(checkpoint), "--device", "cuda", "--kv-cache-memory", memory, "--json"]) == 0
    (target,) = json.loads(capfd.readouterr().out)["footprints"]
    assert (target["device"], target["kv_bytes"]) == ("cuda", 1 << 50)
