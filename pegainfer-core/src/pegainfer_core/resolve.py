"""From what the user typed to what will be served: checkpoint, family, plan, vocabulary, EOS ids.

Owns that one resolution, used by the server, `LLM`, `pegainfer inspect` and the engine process. No torch, no weights.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from pegainfer_core.chat import ChatFormat
from pegainfer_core.checkpoint import Checkpoint, read_json, refuse_lfs_pointer, resolve_checkpoint
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import CheckpointError, ConfigError
from pegainfer_core.family import ModelFamily, ModelPlan
from pegainfer_core.family_calls import blamed, check_plan, checked
from pegainfer_core.hf_config import read_eos
from pegainfer_core.plugins import Plugins, parse_options
from pegainfer_core.tokenizer import Tokenizer, read_special_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """What will be served. `config.model` is the local directory."""

    config: EngineConfig
    checkpoint: Checkpoint
    family: ModelFamily
    package: str
    """Distribution and version that brought the family."""
    plan: ModelPlan
    vocab_size: int
    """Ids below this can be decoded; the rest of the logits' width is padding."""
    eos_token_ids: frozenset[int]
    """Of config.json, generation_config.json and the tokenizer together."""
    unknown_eos_token_ids: frozenset[int]
    """Those of the files that no token has; they can never be sampled."""

    @property
    def warnings(self) -> list[str]:
        """What is odd and no reason to refuse."""
        if not self.unknown_eos_token_ids:
            return []
        ids = ", ".join(map(str, sorted(self.unknown_eos_token_ids)))
        return [f"eos_token_id {ids}: no token has this id, so no answer can end with it"]

    def load_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises CheckpointError, or PluginError if the family's code fails."""
        with blamed(self.family, self.package, "tokenizer"):
            made = self.family.tokenizer(self.checkpoint.path)
        return checked(made, Tokenizer, self.family, self.package, "tokenizer")

    def load_chat_format(self, tokenizer: Tokenizer) -> ChatFormat:
        """How messages become a prompt. Raises CheckpointError, or PluginError if the family's code fails."""
        with blamed(self.family, self.package, "chat_format"):
            made = self.family.chat_format(tokenizer, self.checkpoint.path)
        return checked(made, ChatFormat, self.family, self.package, "chat_format")


def resolve_model(config: EngineConfig, plugins: Plugins, *, configs_only: bool = False) -> ResolvedModel:
    """Find the checkpoint and its family and let it plan.

    `configs_only` downloads no weights. Raises ConfigError, UnsupportedModelError or CheckpointError, and PluginError if the family's
    code fails.
    """
    checkpoint = resolve_checkpoint(config.model, config.revision, configs_only=configs_only)
    family = plugins.claim(checkpoint.config)
    package = " ".join(plugins.family_origin(family))
    plan = _plan(family, package, checkpoint, config)
    if config.max_model_len is not None and config.max_model_len > plan.max_context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the {plan.max_context} positions of this checkpoint (config.json)"
        )
    vocabulary = _read_vocabulary(checkpoint.path)
    eos_token_ids = plan.eos_token_ids | read_eos(checkpoint.config, checkpoint.generation_config)
    eos_text = read_special_tokens(checkpoint.path).get("eos_token")
    if eos_text in vocabulary:
        eos_token_ids |= {vocabulary[eos_text]}
    vocab_size = min(plan.vocab_size, max(vocabulary.values(), default=plan.vocab_size - 1) + 1)
    return ResolvedModel(
        config=msgspec.structs.replace(config, model=str(checkpoint.path), revision=None),
        checkpoint=checkpoint,
        family=family,
        package=package,
        plan=plan,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size),
        unknown_eos_token_ids=frozenset(token_id for token_id in eos_token_ids if token_id >= vocab_size),
    )


def _plan(family: ModelFamily, package: str, checkpoint: Checkpoint, config: EngineConfig) -> ModelPlan:
    """The family's plan. It gets copies: what it does to them reaches nobody else."""
    with blamed(family, package, "options"):
        options = parse_options(family, config.options)
    own_config = msgspec.structs.replace(config, options=dict(config.options))
    with blamed(family, package, "plan"):
        made = family.plan(copy.deepcopy(checkpoint.config), own_config, options)
    plan = checked(made, ModelPlan, family, package, "plan")
    check_plan(plan, family, package)
    return plan


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: Any = None


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that say which ids exist; decoding only these takes milliseconds."""

    added_tokens: list[_AddedToken] = []
    model: _Model = msgspec.field(default_factory=_Model)


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Token text to id; empty if there is no tokenizer.json (then the width of the logits is all that is known)."""
    file = path / "tokenizer.json"
    if not file.exists():
        return {}
    try:
        parsed = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        refuse_lfs_pointer(file)
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    vocab = parsed.model.vocab or {}
    try:
        if isinstance(vocab, list):  # Unigram: [text, score] by id
            vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab)}
        vocabulary: dict[str, int] = msgspec.convert(vocab, dict[str, int])
    except (msgspec.ValidationError, TypeError, LookupError) as error:
        raise CheckpointError(f"{file}: the vocabulary is malformed: {error}") from error
    vocabulary.update({token.content: token.id for token in parsed.added_tokens})
    config_file = path / "tokenizer_config.json"
    declared = _optional(config_file).get("added_tokens_decoder") or {}
    try:
        vocabulary.update({fields["content"]: int(key) for key, fields in declared.items()})
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{config_file}: added_tokens_decoder is malformed: {error}") from error
    return vocabulary


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}
