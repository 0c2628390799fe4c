"""The postcard a plugin author reads: what a family says about itself and what core does with it.

Owns the contract between core and the packages of model families. Imports neither torch nor transformers; `build` and `Model` are where a
family starts to. Core never names a family and asks it nothing that is not written here.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pegainfer_core.chat import ChatFormat, TemplateChatFormat
from pegainfer_core.config import EngineConfig
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pegainfer_core.model import BuildContext, Model

KVKind = Literal["full", "sliding", "latent", "state"]
Tier = Literal["stable", "maturing", "bring-up"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SupportCard:
    """What a family serves and how well: a row of `pegainfer models` and of the README's table."""

    checkpoints: tuple[str, ...]
    """Published checkpoints this family serves, as hub ids or ranges ("Qwen3 dense 0.6B to 32B")."""
    attention: str
    """For example "GQA" or "3 of 4 layers gated DeltaNet"."""
    precisions: tuple[str, ...]
    parallelism: tuple[str, ...] = ()
    """Kinds of parallelism beyond one device ("tp", "ep")."""
    features: tuple[str, ...] = ()
    """For example "chunked prefill", "prefix cache", "tools"."""
    tier: Tier = "bring-up"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a layer's recurrent state, for one request."""

    name: str
    """For people: "conv", "recurrent"."""
    shape: tuple[int, ...]
    dtype: Literal["model", "float32"] = "model"
    """model: the type of weights and activations; float32 is never narrowed."""

    def num_bytes(self, itemsize: int) -> int:
        """Bytes for one request and layer, where the model's type has values of `itemsize` bytes."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else itemsize)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose per-token (or per-request) memory has the same shape and lifetime. Core turns groups into pools.

    A group of kind `state` has `state` tensors, one of kind `latent` a rank, every other kind heads.
    """

    kind: KVKind
    layers: tuple[int, ...]
    """Model layer indices, in order."""
    num_kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    """Tokens visible to a sliding group, the current one included."""
    latent_rank: int = 0
    """Of a latent group: size of the vector from which keys and values of all heads are computed."""
    latent_rope_dim: int = 0
    """Of a latent group: size of the rotated key that all heads share. A token's vector and this key lie side by side."""
    state: tuple[StateTensor, ...] = ()
    """What each layer of a state group remembers of a request. `ForwardBatch.states` has the tensors, in this order."""

    @property
    def values_per_token(self) -> int:
        """Cache values that one token needs in one layer: keys and values, or what both are computed from."""
        return 2 * self.num_kv_heads * self.head_dim + self.latent_rank + self.latent_rope_dim

    def bytes_per_slot(self, itemsize: int) -> int:
        """Bytes of state that one request needs in all layers, where the model's type has values of `itemsize` bytes."""
        return len(self.layers) * sum(tensor.num_bytes(itemsize) for tensor in self.state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the checkpoint, by its published name and shape."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()
    """(first, count) of the pieces along dimension 0, in the order in which they are loaded; each row once. Empty: as stored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """Which checkpoint tensors make up one parameter. Loading is strict both ways: every rule's sources must exist with the declared
    shape and a floating type, and every tensor of the checkpoint must belong to a rule or match `ModelPlan.skipped_tensors`."""

    parameter: str
    """Name in the module's `named_parameters()`."""
    sources: tuple[TensorSpec, ...]
    """Concatenated along dimension 0, in this order (q, k, v; gate, up)."""
    tied_to: str | None = None
    """If the checkpoint has none of the sources, share this other parameter. The file decides: a tensor that is there is used."""
    offset: float = 0.0
    """Added to each value, in the parameter's type: norms that store the difference to 1."""

    @property
    def num_values(self) -> int:
        """Values in the parameter."""
        total = 0
        for source in self.sources:
            count = 1
            for size in source.shape:
                count *= size
            total += count
        return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Facts core may rely on, computed from config.json alone: no torch, no weights read."""

    family: str
    config: Any
    """The family's own frozen config; core only hands it back."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """The checkpoint's own type."""
    vocab_size: int
    """Rows of the logits, padding included."""
    hidden_size: int
    num_layers: int
    max_context: int
    """Longest sequence the positions support (config key max_position_embeddings, with rope scaling)."""
    eos_token_ids: frozenset[int]
    """From config.json; core adds those of generation_config.json and the tokenizer."""
    kv_groups: tuple[KVGroup, ...]
    weight_rules: tuple[WeightRule, ...]
    skipped_tensors: tuple[str, ...] = ()
    """Regular expressions (full match) of checkpoint tensors that are deliberately not loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a family that has none."""


class ModelFamily(ABC):
    """One family of checkpoints. Override what differs; a missing abstract method fails at construction."""

    name: ClassVar[str]
    """Identity in logs, errors and `pegainfer models`, for example "qwen3"."""
    support: ClassVar[SupportCard]
    options: ClassVar[type[Any]] = NoOptions
    """Frozen dataclass; its fields are the -o name=value options, their metadata["help"] the help text."""

    @abstractmethod
    def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
        """None if this family serves a checkpoint with this config.json, else a one-line reason. Looks at identity only."""

    @abstractmethod
    def plan(self, hf_config: Mapping[str, Any], engine_config: EngineConfig, options: Any) -> ModelPlan:
        """Read config.json strictly. Raises ConfigError naming the key, its value and what is supported."""

    @abstractmethod
    def build(self, plan: ModelPlan, context: BuildContext) -> Model:
        """The module with its parameters on the meta device; core fills them by `plan.weight_rules`. Torch starts here."""

    def tokenizer(self, path: Path) -> Tokenizer:
        """The checkpoint's tokenizer; default: tokenizer.json."""
        return load_tokenizer(path)

    def chat_format(self, tokenizer: Tokenizer, path: Path) -> ChatFormat:
        """How messages become a prompt; default: the checkpoint's own template."""
        return TemplateChatFormat(tokenizer, path)

    def scheduler(self, plan: ModelPlan, limits: SchedulerLimits, cache: KVCache) -> Scheduler:
        """The scheduler; default: core's."""
        del plan
        return Scheduler(limits, cache)
