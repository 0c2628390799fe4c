"""Rotary position embedding as config.json describes it, in either spelling.

Owns `RopeConfig` and `read_rope`. Holds the numbers only: `ops.rope` turns them into tables. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from pegainfer_core.config_reader import ConfigReader

RopeType = Literal["default", "linear", "yarn", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Inverse frequencies divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071), with the extensions of DeepSeek (mscale) and gpt-oss (truncate)."""

    factor: float
    """Context extension; where the file has none, max_position_embeddings over the original."""
    original_max_position_embeddings: int
    """Context of the pretraining; max_position_embeddings where the file does not say."""
    beta_fast: float = 32.0
    """Rotations over the original context above which a dimension is left alone."""
    beta_slow: float = 1.0
    """Rotations below which a dimension is divided by `factor`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Factor of cos and sin; None: computed, see `attention_scaling`."""
    truncate: bool = True
    """Round the bounds of the ramp outwards to whole dimensions."""

    @property
    def attention_scaling(self) -> float:
        """Factor of cos and sin that holds in the end, as transformers 5.24 computes it."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of heads; `ops.rope` turns it into tables."""

    theta: float
    """Base of the frequencies."""
    scaling: LinearScaling | YarnScaling | Llama3Scaling | None = None
    """None: type default."""
    fraction: float = 1.0
    """Share of a head's dimensions that is rotated: the first ones, in halves of their own. See `rotary_rows`."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions that are rotated."""
        return int(head_dim * self.fraction)

    def max_context(self, max_position_embeddings: int) -> int:
        """Longest sequence the positions are meant for.

        YaRN: original context * factor where that is longer (Qwen3's model cards add a scaling without raising
        max_position_embeddings). Every other type: max_position_embeddings, which published llama3 and linear configs
        already give extended.
        """
        if isinstance(self.scaling, YarnScaling):
            extended = int(self.scaling.original_max_position_embeddings * self.scaling.factor)
            return max(max_position_embeddings, extended)
        return max_position_embeddings


def rotary_rows(heads: int, head_dim: int, rotary_dim: int) -> tuple[tuple[int, int], ...]:
    """Order in which rows of query and key heads are loaded (TensorSpec.rows), so that dimension i turns with i + D / 2.

    Published weights turn i with i + rotary_dim / 2. Scores do not mind the order of dimensions that queries and keys have
    alike; those that are not rotated have frequency 0 in the tables.
    """
    if rotary_dim == head_dim:
        return ()
    turned, kept = rotary_dim // 2, (head_dim - rotary_dim) // 2
    pieces = ((0, turned), (rotary_dim, kept), (turned, turned), (rotary_dim + kept, kept))
    return tuple((head * head_dim + first, count) for head in range(heads) for first, count in pieces)


def paired_rows(heads: int, head_dim: int, rotary_dim: int) -> tuple[tuple[int, int], ...]:
    """The same for published weights that turn dimension 2 i with 2 i + 1, in the last `rotary_dim` rows of each head."""
    kept = head_dim - rotary_dim
    one_head = [(0, kept)] if kept else []
    one_head += [(kept + start + 2 * pair, 1) for start in (0, 1) for pair in range(rotary_dim // 2)]
    return tuple((head * head_dim + first, count) for head in range(heads) for first, count in one_head)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Attention temperature of YaRN for a context extension: 0.1 * mscale * ln(factor) + 1, and 1 without extension."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(
    reader: ConfigReader,
    *,
    default_theta: float | None = None,
    default_fraction: float | None = None,
    supported: Sequence[RopeType] = ROPE_TYPES,
) -> RopeConfig:
    """The rope of a config in either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5).

    `default_theta` holds where the file has none (None: it must), `default_fraction` likewise of partial_rotary_factor (None:
    only 1 is supported). Raises ConfigError for an unknown type, naming
    `supported`, and for two spellings that contradict each other; unknown sub-keys are named by `reader.finish()`.
    """
    section = _rope_section(reader)
    theta = reader.float("rope_theta", None, above=0)
    fraction = _fraction(reader, section, default_fraction)
    if section is None:
        return RopeConfig(theta=_theta(reader, theta, default_theta), fraction=fraction)
    nested_theta = section.float("rope_theta", None, above=0)
    if theta is not None and nested_theta is not None and theta != nested_theta:
        raise reader.error(f"rope_theta is {theta:g} but {section.path('rope_theta')} is {nested_theta:g}")
    theta = _theta(reader, theta if nested_theta is None else nested_theta, default_theta)
    rope_type = _rope_type(section, supported)
    if rope_type == "linear":
        return RopeConfig(theta=theta, scaling=LinearScaling(factor=_factor(section)), fraction=fraction)
    if rope_type == "yarn":
        return RopeConfig(theta=theta, scaling=_yarn(reader, section), fraction=fraction)
    if rope_type == "llama3":
        return RopeConfig(theta=theta, scaling=_llama3(reader, section), fraction=fraction)
    return RopeConfig(theta=theta, fraction=fraction)


def _fraction(reader: ConfigReader, section: ConfigReader | None, default: float | None) -> float:
    """partial_rotary_factor, beside the section or in it."""
    readers = [reader] if section is None else [reader, section]
    if default is None:
        for each in readers:
            each.only("partial_rotary_factor", 1)
        return 1.0
    found = [each.float("partial_rotary_factor", None, above=0) for each in readers]
    given = {value for value in found if value is not None}
    if len(given) > 1:
        raise reader.error(f"partial_rotary_factor is {found[0]:g} in one place and {found[1]:g} in another")
    fraction = given.pop() if given else default
    if fraction > 1:
        raise reader.error(f"partial_rotary_factor is {fraction:g}; {reader.family} needs a number of at most 1")
    return fraction


def _theta(reader: ConfigReader, theta: float | None, default_theta: float | None) -> float:
    theta = default_theta if theta is None else theta
    if theta is None:
        raise reader.error(f"rope_theta is missing; {reader.family} needs it")
    return theta


def _rope_section(reader: ConfigReader) -> ConfigReader | None:
    """The one section that speaks; both may only where they say the same."""
    old, new = reader.optional_section("rope_scaling"), reader.optional_section("rope_parameters")
    if old is None or new is None:
        return new or old
    if _normal(old) != _normal(new):
        raise reader.error("rope_scaling and rope_parameters contradict each other")
    old.no_effect(*old.mapping)  # the same as in `new`, where they are read
    return new


def _normal(section: ConfigReader) -> dict[str, Any]:
    found = {key: value for key, value in section.mapping.items() if key not in ("type", "rope_theta")}
    found.setdefault("rope_type", section.mapping.get("type", "default"))
    return found


def _rope_type(section: ConfigReader, supported: Sequence[RopeType]) -> RopeType:
    """`rope_type`, or `type` as older files spell it; default where there is neither."""
    old = section.choice("type", supported, None)
    new = section.choice("rope_type", supported, None)
    if old is not None and new is not None and old != new:
        raise section.error(f"{section.path('type')} is {old!r} but {section.path('rope_type')} is {new!r}")
    return new or old or "default"


def _factor(section: ConfigReader) -> float:
    factor = section.float("factor")
    if factor < 1.0:
        raise section.error(f"{section.path('factor')} is {factor:g}; {section.family} needs a number of at least 1")
    return factor


def _original(reader: ConfigReader, section: ConfigReader) -> int:
    """Pretraining context: beside the section (Phi3's way), in it, or max_position_embeddings."""
    max_position_embeddings = reader.int("max_position_embeddings")
    outer = reader.int("original_max_position_embeddings", None)
    inner = section.int("original_max_position_embeddings", None)
    if outer is not None and inner is not None and outer != inner:
        path = section.path("original_max_position_embeddings")
        raise reader.error(f"original_max_position_embeddings is {outer} but {path} is {inner}")
    return outer or inner or max_position_embeddings


def _yarn(reader: ConfigReader, section: ConfigReader) -> YarnScaling:
    original = _original(reader, section)
    factor = _factor(section) if section.has("factor") else reader.int("max_position_embeddings") / original
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.float("beta_fast", 32.0, above=0),
        beta_slow=section.float("beta_slow", 1.0, above=0),
        mscale=section.float("mscale", None),
        mscale_all_dim=section.float("mscale_all_dim", None),
        attention_factor=section.float("attention_factor", None, above=0),
        truncate=section.bool("truncate", True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise section.error(
            f"{section.path('beta_fast')} {scaling.beta_fast:g} is below beta_slow {scaling.beta_slow:g}"
        )
    return scaling


def _llama3(reader: ConfigReader, section: ConfigReader) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_factor(section),
        low_freq_factor=section.float("low_freq_factor", above=0),
        high_freq_factor=section.float("high_freq_factor", above=0),
        original_max_position_embeddings=_original(reader, section),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise section.error(f"{section.path('high_freq_factor')} {high:g} is not above low_freq_factor {low:g}")
    return scaling
