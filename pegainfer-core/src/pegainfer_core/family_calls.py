"""Calls into a family's code: what it may return, and whose mistake it is when it fails.

Owns the line between an error of the user's (ConfigError, told as it is) and a bug of a plugin (PluginError, which names it). Imports no
torch; knows no family.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, TypeVar

from pegainfer_core.errors import ConfigError, PegainferError, PluginError
from pegainfer_core.family import KVGroup, ModelFamily, ModelPlan, WeightRule

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextlib.contextmanager
def blamed(family: ModelFamily, package: str, act: str, *let_through: type[Exception]) -> Iterator[None]:
    """Turn whatever a family's code raises by mistake into a PluginError; the traceback goes to the debug log."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (PegainferError, *let_through)):
            raise
        log.debug("family %s failed in %s", family.name, act, exc_info=error)
        text = " ".join(str(error).split())
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise PluginError(f"{_culprit(family, package)} failed in {act}: {what}") from error


def checked(value: T, kind: type[Any], family: ModelFamily, package: str, act: str) -> T:
    """`value`, which must be a `kind`: annotations bind no plugin. Raises PluginError."""
    if not isinstance(value, kind):
        raise PluginError(
            f"{_culprit(family, package)} returned a {type(value).__name__} from {act}; it must be a {kind.__name__}"
        )
    return value


def check_plan(plan: ModelPlan, family: ModelFamily, package: str) -> None:
    """Raise PluginError for a plan that contradicts its own contract, and ConfigError for KV groups this version has no pools for."""
    culprit = _culprit(family, package)
    for name in ("vocab_size", "hidden_size", "num_layers", "max_context"):
        value = getattr(plan, name)
        if type(value) is not int or value < 1:
            raise PluginError(f"{culprit} planned {name} {value!r}; it must be a positive int")
    for name, kind in (("kv_groups", KVGroup), ("weight_rules", WeightRule)):
        items = getattr(plan, name)
        if not isinstance(items, tuple) or not items or not all(isinstance(item, kind) for item in items):
            raise PluginError(f"{culprit} planned {name} that are no tuple of {kind.__name__}s, or an empty one")
    layers = sorted(layer for group in plan.kv_groups for layer in group.layers)
    if layers != list(range(plan.num_layers)):
        raise PluginError(f"{culprit} planned KV groups that do not cover each of {plan.num_layers} layers once")
    kinds = {group.kind for group in plan.kv_groups}
    for other in sorted(kinds - {"full", "latent", "state"}):
        raise ConfigError(
            f"{plan.family} needs a KV group of kind {other!r}; this version has kinds 'full', 'latent' and 'state'"
        )
    if not kinds & {"full", "latent"}:
        raise ConfigError(f"{plan.family} has no layer of kind 'full' or 'latent'; this version needs one")
    for group in plan.kv_groups:
        heads, latent = (group.num_kv_heads, group.head_dim), (group.latent_rank, group.latent_rope_dim)
        sizes = {"full": heads, "latent": latent, "state": (len(group.state),)}
        if any(all(given) if kind != group.kind else not all(given) for kind, given in sizes.items()):
            raise PluginError(f"{culprit} planned a KV group of kind {group.kind!r} with {_memory(group)}")


def _memory(group: KVGroup) -> str:
    heads = f"{group.num_kv_heads} heads of {group.head_dim}"
    if group.latent_rank or group.latent_rope_dim:
        heads += f", {group.latent_rank} latent values with a shared key of {group.latent_rope_dim}"
    return f"{heads} and {len(group.state)} state tensors"


def _culprit(family: ModelFamily, package: str) -> str:
    return f"family {family.name} ({package})"
