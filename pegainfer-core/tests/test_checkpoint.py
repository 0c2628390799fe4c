"""Where checkpoints are found, what is downloaded, and one clear error for everything that can be wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors as hub
from pegainfer_core.checkpoint import read_json, resolve_checkpoint, weight_files
from pegainfer_core.errors import CheckpointError, ConfigError
from pegainfer_core.tokenizer import load_tokenizer
from safetensors.numpy import save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_tensors(file: Path, *names: str) -> None:
    save_file({name: np.zeros(2, np.float32) for name in names}, file)


def write_index(path: Path, weight_map: Mapping[str, Any]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# local directories


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    checkpoint = resolve_checkpoint(str(tmp_path))
    assert checkpoint.path == tmp_path
    assert checkpoint.name == str(tmp_path)
    assert checkpoint.config == {"model_type": "qwen3"}
    assert checkpoint.generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert resolve_checkpoint(str(tmp_path), configs_only=True).generation_config == {"eos_token_id": [1, 2]}


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_checkpoint("~/model").path == tmp_path / "model"


def test_directory_takes_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision is for hub ids"):
        resolve_checkpoint(str(tmp_path), "main")


@pytest.mark.parametrize("model", ["/no/such/directory", "./model", "../model", "a/b/c", "~/no-such-model", "a b/c"])
def test_no_such_directory(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory \(and not a hub id such as Qwen/Qwen3-0\.6B\)"):
        resolve_checkpoint(model)


@pytest.mark.parametrize("model", ["", "  "])
def test_empty_name(model: str) -> None:
    with pytest.raises(CheckpointError, match="the model is empty; give a directory or a hub id"):
        resolve_checkpoint(model)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file; give the checkpoint's directory"):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing; a checkpoint directory needs it"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b" 2}', "not valid JSON: Expecting ':' delimiter at line 2 column 6"),
        (b"", "not valid JSON: Expecting value at line 1 column 1"),
        (b"[1]", "holds no JSON object"),
        (b'{"a": "\xff"}', "not valid JSON: .*utf-8"),
        (b"[" * 100_000, "not valid JSON: .*recursion"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_bad_json_is_named_with_its_position(content: bytes, message: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} (is )?{message}"):
        resolve_checkpoint(str(tmp_path))


def test_unreadable_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Is a directory"):
        read_json(tmp_path / "config.json")


# weight files


def test_single_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", "a", "b")
    file = tmp_path / "model.safetensors"
    assert weight_files(tmp_path) == {"a": file, "b": file}


def test_shards(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1.safetensors", "a", "b")
    write_tensors(tmp_path / "2.safetensors", "c")
    write_index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    assert weight_files(tmp_path) == {"a": first, "b": first, "c": second}


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", "a")
    write_index(tmp_path, {"b": "2.safetensors"})
    assert list(weight_files(tmp_path)) == ["a"]


def test_tensors_beside_the_index_are_listed(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1.safetensors", "a", "extra")
    write_index(tmp_path, {"a": "1.safetensors"})
    assert set(weight_files(tmp_path)) == {"a", "extra"}


def test_the_index_says_which_of_two_files_counts(tmp_path: Path) -> None:
    for file in ("1.safetensors", "2.safetensors"):
        write_tensors(tmp_path / file, "a", file)
    write_index(tmp_path, {"a": "1.safetensors", "2.safetensors": "2.safetensors"})
    assert weight_files(tmp_path)["a"] == tmp_path / "1.safetensors"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1.safetensors", "a")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"})
    with pytest.raises(CheckpointError, match=r"2\.safetensors is missing \(2 of 3 shards"):
        weight_files(tmp_path)


def test_tensor_that_its_shard_does_not_have(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1.safetensors", "a")
    write_index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"1\.safetensors has no tensor b"):
        weight_files(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_shard_that_was_cut_off(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, "a", "b")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no complete safetensors file"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [None, {}, [], {"a": 1}, {"a": "../x.safetensors"}, {"a": "x.bin"}, {"a": "d/x.safetensors"}]
)
def test_index_of_another_form(weight_map: Any, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json(:| has no weight_map)"):
        weight_files(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"there is pytorch_model\.bin\. Only safetensors checkpoints are served"):
        weight_files(tmp_path)


# the hub


class FakeHub:
    """Stands where `snapshot_download` does: a repository of files, copied by pattern into a snapshot directory."""

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        self.calls: list[tuple[str, str | None, list[str]]] = []
        self._snapshot = path / COMMIT
        self._files = files

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: Sequence[str], library_name: str) -> str:
        assert library_name == "pegainfer"
        self.calls.append((repo_id, revision, list(allow_patterns)))
        self._snapshot.mkdir(exist_ok=True)
        for name in [name for name in self._files if any(fnmatch(name, pattern) for pattern in allow_patterns)]:
            (self._snapshot / name).write_text(self._files[name])
        return str(self._snapshot)


FILES = {
    "config.json": '{"model_type": "qwen3"}',
    "generation_config.json": '{"eos_token_id": 3}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "x",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}),
    "m-1.safetensors": "",
    "m-2.safetensors": "",
    "consolidated.safetensors": "",
    "pytorch_model.bin": "",
    "README.md": "",
    "model.py": "",
}


def test_hub_brings_text_files_and_the_shards_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    checkpoint = resolve_checkpoint("org/name", "v1")
    assert checkpoint.name == "org/name"
    assert checkpoint.config == {"model_type": "qwen3"}
    assert checkpoint.generation_config == {"eos_token_id": 3}
    unwanted = {"consolidated.safetensors", "pytorch_model.bin", "README.md", "model.py"}
    assert {file.name for file in checkpoint.path.iterdir()} == set(FILES) - unwanted
    # weights come from the commit that the first call resolved, whatever the branch does meanwhile
    assert [(repo, revision) for repo, revision, _ in fake.calls] == [("org/name", "v1"), ("org/name", COMMIT)]


def test_hub_checkpoint_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, {"config.json": "{}", "model.safetensors": "", "pytorch_model.bin": ""})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    path = resolve_checkpoint("name").path
    assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors"}


def test_configs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    checkpoint = resolve_checkpoint("org/name", configs_only=True)
    assert {file.name for file in checkpoint.path.iterdir()} == {"config.json", "generation_config.json"}
    assert len(fake.calls) == 1


def test_hub_repository_without_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(tmp_path, {"README.md": ""}))
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        resolve_checkpoint("org/name")


def http_error(kind: type[Exception], message: str = "x") -> Exception:
    """One of the hub's errors without the response of the HTTP client, which differs between versions."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


class ReadTimeout(Exception):
    """Of a kind that nobody foresaw, as those of the HTTP client are."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(hub.GatedRepoError), "org/name is gated: accept its terms .* `hf auth login` or set HF_TOKEN"),
        (http_error(hub.RepositoryNotFoundError), "no directory here and no repository of the hub; if it is private"),
        (http_error(hub.RevisionNotFoundError), "org/name has no revision 'v1'; --revision takes a branch"),
        (hub.HFValidationError("odd name"), "no hub id: odd name"),
        (hub.LocalEntryNotFoundError("x"), "the hub cannot be reached; check the name and the network"),
        (ConnectionError("x"), "the hub cannot be reached"),
        (http_error(hub.HfHubHTTPError, "503 busy\nlong story"), "could not be downloaded: 503 busy; run the command again"),
        (OSError(28, "No space left on device"), "could not be downloaded: .*No space left on device"),
        (ReadTimeout("timed out"), "could not be downloaded: timed out; run the command again to resume"),
        (RuntimeError(), "could not be downloaded: RuntimeError;"),
    ],
)  # fmt: skip
def test_every_failure_of_the_hub_is_one_line(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_checkpoint("org/name", "v1")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def resolve_offline(model: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Resolve with the real library in a process that HF_HUB_OFFLINE was set for."""
    program = f"""
import sys
from pegainfer_core.checkpoint import resolve_checkpoint
from pegainfer_core.errors import CheckpointError
try:
    sys.stdout.write(str(resolve_checkpoint({model!r}).config))
except CheckpointError as error:
    sys.exit(str(error))
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)


def test_offline_mode_uses_the_cache_and_nothing_else(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    (cached / "snapshots" / COMMIT / "config.json").write_text('{"model_type": "qwen3"}')
    found = resolve_offline("org/name", tmp_path)
    assert (found.returncode, found.stdout) == (0, "{'model_type': 'qwen3'}"), found.stderr
    missing = resolve_offline("org/other", tmp_path)
    assert missing.returncode == 1
    assert f"org/other is not in the hub cache {tmp_path / 'hub'} and HF_HUB_OFFLINE is set" in missing.stderr


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1503300328\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_recognised(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    read: dict[str, Callable[[], object]] = {
        "config.json": lambda: resolve_checkpoint(str(tmp_path)),
        "model.safetensors": lambda: weight_files(tmp_path),
        "tokenizer.json": lambda: load_tokenizer(tmp_path),
    }
    with pytest.raises(CheckpointError) as caught:
        read[name]()
    assert (
        str(caught.value) == f"{tmp_path / name} is a Git LFS pointer, not the file; run `git lfs pull` in {tmp_path}"
    )
