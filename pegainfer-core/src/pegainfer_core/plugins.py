"""Finding families and observers: the only module that touches pluggy's relay.

Owns discovery (entry-point group `pegainfer`), the isolation of broken plugins, and the decision which family serves a
checkpoint. After loading, everything is a typed object. Importing this module loads nothing; `load_plugins` does. It
names no family: which extra serves a model type is published as data, in the entry-point group `pegainfer.model_types`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from pegainfer_core import hookspecs
from pegainfer_core.errors import PluginError, UnsupportedModelError
from pegainfer_core.family import ModelFamily, SupportCard
from pegainfer_core.family_options import check_options_class, parse_options

if TYPE_CHECKING:
    from pegainfer_core.engine import StepReport

__all__ = ["BrokenPlugin", "Implementation", "Plugins", "load_plugins", "parse_options"]

GROUP = "pegainfer"
"""Entry points whose modules implement hooks."""
HOOKSPEC_GROUP = "pegainfer.hookspecs"
"""Entry points whose modules declare further hooks (the server's), so that every process knows every hook's name."""
MODEL_TYPE_GROUP = "pegainfer.model_types"
"""Data, never loaded: the name of an entry point is a model_type, its value the extra of `pegainfer` that serves it."""
ALLOW_LIST_VARIABLE = "PEGAINFER_PLUGINS"
"""Comma-separated names of the entry points to load; unset loads all, empty loads none."""


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that is installed but not usable, and why."""

    name: str
    """Name of its entry point."""
    distribution: str
    version: str
    reason: str
    """One line."""

    def __str__(self) -> str:
        return f"{self.name}: not loaded - {self.reason} ({self.distribution} {self.version})"


@dataclasses.dataclass(frozen=True, slots=True)
class Implementation:
    """One plugin's implementation of one hook; call it with all arguments of the hook, it takes those it wants."""

    plugin: str
    function: Callable[..., Any]
    argument_names: tuple[str, ...]

    def __call__(self, **arguments: Any) -> Any:
        """What the plugin returns."""
        return self.function(*(arguments[name] for name in self.argument_names))


class Plugins:
    """What is installed: families sorted by name, the plugins that are broken, and who implements the other hooks."""

    def __init__(self, manager: pluggy.PluginManager, origins: Mapping[str, EntryPoint]) -> None:
        self._manager = manager
        self._origins = origins
        self._family_origins: dict[str, str] = {}
        self.families: list[ModelFamily] = []
        self.broken: list[BrokenPlugin] = []

    @property
    def names(self) -> list[str]:
        """Names of the plugins in use, sorted."""
        return sorted(set(self._origins) - {broken.name for broken in self.broken})

    def family(self, name: str) -> ModelFamily:
        """The family called `name`. Raises PluginError naming those installed."""
        for family in self.families:
            if family.name == name:
                return family
        raise PluginError(
            f"no family is called {name!r}; installed: {_listed(family.name for family in self.families)}"
        )

    def origin(self, plugin: str) -> tuple[str, str]:
        """(distribution, version) of a plugin."""
        distribution = self._origins[plugin].dist
        return (
            (distribution.name, distribution.version)
            if distribution is not None
            else ("unknown distribution", "unknown")
        )

    def family_origin(self, family: ModelFamily) -> tuple[str, str]:
        """(distribution, version) of the plugin that brought a family."""
        return self.origin(self._family_origins[family.name])

    def implementations(self, hook: str) -> list[Implementation]:
        """Who implements `hook`, sorted by plugin name; empty when nobody does."""
        found = [
            Implementation(implementation.plugin_name, implementation.function, tuple(implementation.argnames))
            for implementation in getattr(self._manager.hook, hook).get_hookimpls()
        ]
        return sorted(found, key=lambda implementation: implementation.plugin)

    def step_observers(self) -> list[Callable[[StepReport], None]]:
        """Whom `pegainfer_step_finished` reaches, each to be called with the report; empty when nobody listens."""
        return [_observer(implementation) for implementation in self.implementations("pegainfer_step_finished")]

    def mark_broken(self, plugin: str, error: BaseException | str) -> None:
        """Take a plugin out of use with everything it offered, and remember why."""
        if self._manager.has_plugin(plugin):
            self._manager.unregister(name=plugin)
        self.families = [family for family in self.families if self._family_origins[family.name] != plugin]
        self.broken.append(
            BrokenPlugin(plugin, *self.origin(plugin), error if isinstance(error, str) else _one_line(error))
        )
        self.broken.sort(key=lambda broken: broken.name)

    def claim(self, hf_config: Mapping[str, Any]) -> ModelFamily:
        """The one family that serves a checkpoint with this config.json.

        Raises UnsupportedModelError: nobody does (with everybody's reason and what to install), or more than one does.
        """
        reasons = {family.name: _rejection(family, hf_config) for family in self.families}
        claims = [family for family in self.families if reasons[family.name] is None]
        if len(claims) == 1:
            return claims[0]
        if claims:
            names = " and ".join(family.name for family in claims)
            raise UnsupportedModelError(f"{names} both serve this model; set {ALLOW_LIST_VARIABLE} or uninstall one")
        identity = f"model_type={hf_config.get('model_type')!r}, architectures={hf_config.get('architectures')!r}"
        lines = [f"no installed family serves this model ({identity})", *self._install_hint(hf_config)]
        lines += [f"  {name}: {reason}" for name, reason in reasons.items()]
        lines += [f"  {broken}" for broken in self.broken]
        raise UnsupportedModelError("\n".join(lines))

    def _install_hint(self, hf_config: Mapping[str, Any]) -> list[str]:
        extras = {entry.name: entry.value.replace("_", "-") for entry in entry_points(group=MODEL_TYPE_GROUP)}
        for model_type in _model_types(hf_config):
            extra = extras.get(model_type)
            if extra is None:
                continue
            if extra in self._origins or extra.replace("-", "_") in self._origins:
                return []  # installed: its own reason, or why it is broken, says more
            return [f"config.json says model_type {model_type!r}: install it with pip install 'pegainfer[{extra}]'"]
        if not self._origins:
            return ["  no plugin is in use; families are packages of their own, for example an extra of pegainfer"]
        return []

    def offer(self, plugin: str, families: Sequence[ModelFamily]) -> None:
        """Take a loaded plugin's families into use; a name that two plugins give away takes both out of use."""
        for family in families:
            owner = self._family_origins.get(family.name)
            if owner is not None:
                both = f"{self._named(owner)} and {self._named(plugin)}"
                reason = f"family {family.name!r} comes from both {both}; uninstall one"
                if owner in self.names:
                    self.mark_broken(owner, reason)
                raise PluginError(reason)
        for family in families:
            self._family_origins[family.name] = plugin
        self.families = sorted([*self.families, *families], key=lambda family: family.name)

    def _named(self, plugin: str) -> str:
        return f"{plugin} ({' '.join(self.origin(plugin))})"


def load_plugins(extra_hookspecs: Iterable[ModuleType] = ()) -> Plugins:
    """Import and check every allowed plugin. Called once per process.

    A plugin that fails ends up in `Plugins.broken` and hurts nobody else. Raises PluginError if the allow-list names a
    plugin that is not installed, or the hooks of an installed host cannot be imported.
    """
    manager = pluggy.PluginManager(GROUP)
    for module in {module.__name__: module for module in (hookspecs, *_host_hookspecs(), *extra_hookspecs)}.values():
        manager.add_hookspecs(module)
    plugins = Plugins(manager, _selected(os.environ.get(ALLOW_LIST_VARIABLE)))
    for name, entry_point in plugins._origins.items():
        try:
            _register(manager, name, entry_point.load())
            plugins.offer(name, _families_of(plugins, name))
        except (Exception, SystemExit) as error:  # whatever a plugin does, the others still load
            plugins.mark_broken(name, error)
    return plugins


def _host_hookspecs() -> list[ModuleType]:
    modules: list[ModuleType] = []
    for entry_point in sorted(entry_points(group=HOOKSPEC_GROUP), key=lambda entry_point: entry_point.name):
        try:
            modules.append(entry_point.load())
        except ImportError as error:
            raise PluginError(f"the hooks of {entry_point.name} cannot be imported: {_one_line(error)}") from error
    return modules


def _selected(allow_list: str | None) -> dict[str, EntryPoint]:
    """Entry points by name, in order; the allow-list is applied before anything is imported."""
    installed: dict[str, EntryPoint] = {}
    for entry_point in sorted(entry_points(group=GROUP), key=lambda entry_point: (entry_point.name, entry_point.value)):
        name, suffix = entry_point.name, 2
        while name in installed:  # two distributions may use one name; both are shown
            name, suffix = f"{entry_point.name}-{suffix}", suffix + 1
        installed[name] = entry_point
    if allow_list is None:
        return installed
    wanted = {name.strip() for name in allow_list.split(",")} - {""}
    unknown = wanted - set(installed)
    if unknown:
        raise PluginError(f"{ALLOW_LIST_VARIABLE} names {_listed(unknown)}; installed: {_listed(installed)}")
    return {name: entry_point for name, entry_point in installed.items() if name in wanted}


def _register(manager: pluggy.PluginManager, name: str, plugin: object) -> None:
    """Register one plugin and check all its hooks. Raises PluginError for an unknown hook or a wrapper."""
    manager.register(plugin, name=name)
    for caller in manager.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            if not caller.has_spec() and not implementation.optionalhook:
                raise PluginError(f"there is no hook {caller.name!r}; there are {_listed(_hook_names(manager))}")
            if implementation.hookwrapper or implementation.wrapper:
                raise PluginError(f"hook {caller.name!r} cannot be wrapped")


def _hook_names(manager: pluggy.PluginManager) -> list[str]:
    return [name for name, caller in vars(manager.hook).items() if not name.startswith("_") and caller.has_spec()]


def _families_of(plugins: Plugins, name: str) -> list[ModelFamily]:
    """What a plugin answers to `pegainfer_model_families`, checked. Raises PluginError."""
    families: list[ModelFamily] = []
    for implementation in plugins.implementations("pegainfer_model_families"):
        if implementation.plugin == name:
            families += implementation()
    for family in families:
        if not isinstance(family, ModelFamily):
            raise PluginError(f"pegainfer_model_families returned {family!r}, which is no ModelFamily")
        if not isinstance(getattr(family, "name", None), str) or not isinstance(
            getattr(family, "support", None), SupportCard
        ):
            raise PluginError(f"{type(family).__name__} needs a name and a SupportCard called support")
        check_options_class(family)
    return families


def _rejection(family: ModelFamily, hf_config: Mapping[str, Any]) -> str | None:
    try:
        # a copy: the next family sees what is in the file
        reason: Any = family.rejects(copy.deepcopy(hf_config))
    except (Exception, SystemExit) as error:  # a family that fails on a stranger's config declines it
        return f"could not read config.json - {_one_line(error)}"
    if reason is None or isinstance(reason, str):
        return reason
    return f"its rejects() returned {type(reason).__name__} {reason!r}, not a reason or None"


def _observer(implementation: Implementation) -> Callable[[StepReport], None]:
    def observe(report: StepReport) -> None:
        implementation(report=report)

    return observe


def _model_types(hf_config: Mapping[str, Any]) -> list[str]:
    text_config = hf_config.get("text_config")
    inner = text_config.get("model_type") if isinstance(text_config, Mapping) else None
    return [model_type for model_type in (hf_config.get("model_type"), inner) if isinstance(model_type, str)]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
