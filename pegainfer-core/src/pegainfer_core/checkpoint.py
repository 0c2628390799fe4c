"""Where a checkpoint lies: a local directory, or a repository of the Hugging Face hub brought into its cache.

Owns `Checkpoint`, the download and the listing of weight files. Reads JSON and safetensors headers, never a weight;
knows no family. Every failure is one CheckpointError (or ConfigError, for a flag) that says what to do. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pegainfer_core.errors import CheckpointError, ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILES = ("config.json", "generation_config.json")
TEXT_FILES = (
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that was cloned without Git LFS."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FOREIGN = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory and its parsed configuration."""

    path: Path
    name: str
    """The model as the user named it: a directory or a hub id."""
    config: dict[str, Any]
    """config.json."""
    generation_config: dict[str, Any]
    """generation_config.json; empty if the checkpoint has none."""


def resolve_checkpoint(model: str, revision: str | None = None, *, configs_only: bool = False) -> Checkpoint:
    """Find a directory or download a hub repository, and read its configuration.

    `configs_only` brings no weights and no tokenizer, for questions that config.json answers. Environment variables of
    huggingface_hub hold (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Raises CheckpointError, and ConfigError for a revision of
    a local directory.
    """
    if not model.strip():
        raise CheckpointError("the model is empty; give a directory or a hub id such as Qwen/Qwen3-0.6B")
    local = Path(model).expanduser()
    if local.is_dir():
        if revision is not None:
            raise ConfigError(f"--revision is for hub ids; {model} is a directory")
        return open_checkpoint(local, model)
    if local.exists():
        raise CheckpointError(f"{model} is a file; give the checkpoint's directory, the one with config.json")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model}: no such directory (and not a hub id such as Qwen/Qwen3-0.6B)")
    return open_checkpoint(_download(model, revision, configs_only), model)


def open_checkpoint(path: Path, name: str) -> Checkpoint:
    """Read the configuration of a checkpoint directory."""
    generation = path / "generation_config.json"
    return Checkpoint(
        path=path,
        name=name,
        config=read_json(path / "config.json"),
        generation_config=read_json(generation) if generation.exists() else {},
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file and, for bad JSON, line and column."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; a checkpoint directory needs it") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        refuse_lfs_pointer(file)
        where = f"line {error.lineno} column {error.colno}"
        raise CheckpointError(f"{file} is not valid JSON: {error.msg} at {where}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return value


def refuse_lfs_pointer(file: Path) -> None:
    """Raise CheckpointError if Git LFS has left a pointer in a file's place. Ask when a file cannot be read as what it should be."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(f"{file} is a Git LFS pointer, not the file; run `git lfs pull` in {file.parent}")


# weight files


def weight_files(path: Path) -> dict[str, Path]:
    """File of every tensor of a checkpoint directory, from the safetensors headers.

    As in transformers, model.safetensors wins over an index beside it. Tensors that are in a listed shard but not in
    the index are included: strict loading shall see them. Raises CheckpointError for a missing or damaged shard, a
    tensor that its shard does not have, and a checkpoint without safetensors.
    """
    shards = shard_names(path)
    if (path / SINGLE_FILE).exists():
        return dict.fromkeys(tensor_names(path / SINGLE_FILE), path / SINGLE_FILE)
    weight_map = read_index(path / INDEX_FILE)
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{path / missing[0]} is missing ({len(missing)} of {len(shards)} shards of {INDEX_FILE} are)"
        )
    names = {shard: tensor_names(path / shard) for shard in shards}
    files = {name: path / shard for shard in shards for name in sorted(names[shard])}
    for name, shard in weight_map.items():
        if name not in names[shard]:
            raise CheckpointError(f"{path / shard} has no tensor {name}, although {INDEX_FILE} says so")
        files[name] = path / shard
    return files


def shard_names(path: Path) -> list[str]:
    """Names of the files that hold the weights, none of them opened; an index may name some that are missing. Raises CheckpointError."""
    if (path / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    if not (path / INDEX_FILE).exists():
        raise _no_safetensors(path)
    return sorted(set(read_index(path / INDEX_FILE).values()))


def read_index(file: Path) -> dict[str, str]:
    """Tensor name to shard file name. Raises CheckpointError for another form or a shard outside the directory."""
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{file}: the shard of {name} is {shard!r}; it must be the name of a safetensors file"
            )
    return weight_map


def tensor_names(file: Path) -> frozenset[str]:
    """Names in the header of a safetensors file. Raises CheckpointError if the file is damaged or cut off."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return frozenset(opened.keys())
    except SafetensorError as error:
        refuse_lfs_pointer(file)
        raise CheckpointError(f"{file} is no complete safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} is no complete safetensors file: {error}") from error


def has_foreign_weights(path: Path) -> bool:
    """Whether a directory has weights of other names or kinds than those that are served."""
    return any(any(path.glob(pattern)) for pattern in _FOREIGN)


def _no_safetensors(path: Path) -> CheckpointError:
    found = sorted({file.name for pattern in _FOREIGN for file in path.glob(pattern)})
    there = f"; there is {', '.join(found[:3])}" if found else ""
    rule = "Only safetensors checkpoints are served, never pickle files"
    return CheckpointError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}{there}. {rule}")


# hub


def _download(model: str, revision: str | None, configs_only: bool) -> Path:
    """Small files first; then, of the very same commit, exactly the weight files that the index names."""
    path = _snapshot(model, revision, CONFIG_FILES if configs_only else CONFIG_FILES + TEXT_FILES)
    if configs_only:
        return path
    index = path / INDEX_FILE
    shards = sorted(set(read_index(index).values())) if index.exists() else []
    return _snapshot(model, path.name, [SINGLE_FILE, *shards])


def _snapshot(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model, revision=revision, allow_patterns=list(patterns), library_name="pegainfer")
    except Exception as error:  # the types differ between versions of the library and of its HTTP client
        raise CheckpointError(_hub_message(model, revision, error)) from error
    return Path(str(found))


def _hub_message(model: str, revision: str | None, error: Exception) -> str:
    """What went wrong with the hub and what to do, in one line."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its terms on its hub page, then run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r}; --revision takes a branch, a tag or a full commit hash"
    if isinstance(error, errors.RepositoryNotFoundError):
        where = "no directory here and no repository of the hub"
        return f"{model} is {where}; if it is private, run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return f"{model} is no directory here and no hub id: {error}"
    if constants.HF_HUB_OFFLINE:
        where = f"not in the hub cache {constants.HF_HUB_CACHE}"
        return f"{model} is {where} and HF_HUB_OFFLINE is set; unset it, or give a directory"
    if isinstance(error, (errors.LocalEntryNotFoundError, ConnectionError)):
        where = f"not in the hub cache {constants.HF_HUB_CACHE} and the hub cannot be reached"
        return f"{model} is no directory here, {where}; check the name and the network, or give a directory"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{model} could not be downloaded: {first_line}; run the command again to resume"
