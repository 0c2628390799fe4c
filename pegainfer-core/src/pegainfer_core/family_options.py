"""Family options: the text of `-o name=value` turned into a family's options dataclass.

Owns the check of the dataclass and the conversion by its field types: bool, int, float, str, Literal, and each of them
or None. Knows no family.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pegainfer_core.errors import ConfigError, PluginError
from pegainfer_core.family import ModelFamily

_SCALARS = (bool, int, float, str)
_BOOLEANS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def parse_options(family: ModelFamily, texts: Mapping[str, str]) -> Any:
    """The family's options with these values. Raises ConfigError naming the option and what would be right."""
    hints = check_options_class(family)
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in hints:
            known = f"it has {', '.join(sorted(hints))}" if hints else "it has no options"
            raise ConfigError(f"-o {name}={text}: {family.name} has no option {name!r}; {known}")
        try:
            values[name] = _convert(text, hints[name])
        except ValueError as error:
            raise ConfigError(f"-o {name}={text}: {family.name} wants {describe_type(hints[name])}") from error
    try:
        return family.options(**values)
    except ValueError as error:  # raised by the dataclass's own check of ranges
        raise ConfigError(f"options of {family.name}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class OptionHelp:
    """One option, in words."""

    name: str
    type: str
    default: str
    help: str


def describe_options(family: ModelFamily) -> list[OptionHelp]:
    """The family's options, for help texts."""
    hints = check_options_class(family)
    defaults = family.options()
    return [
        OptionHelp(
            field.name,
            describe_type(hints[field.name]),
            str(getattr(defaults, field.name)),
            str(field.metadata.get("help", "")),
        )
        for field in dataclasses.fields(family.options)
    ]


def check_options_class(family: ModelFamily) -> dict[str, Any]:
    """Type of each option. Raises PluginError unless a frozen dataclass, all defaulted, of usable types."""
    options = family.options
    if not dataclasses.is_dataclass(options) or not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise PluginError(f"options of family {family.name!r} must be a frozen dataclass")
    hints = get_type_hints(options)
    types_by_name: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise PluginError(f"option {field.name!r} of family {family.name!r} needs a default")
        for kind in _members(hints[field.name]):
            if kind not in (*_SCALARS, type(None)) and get_origin(kind) is not Literal:
                raise PluginError(
                    f"option {field.name!r} of family {family.name!r} has a type that text cannot give: {kind}"
                )
        types_by_name[field.name] = hints[field.name]
    return types_by_name


def describe_type(hint: Any) -> str:
    """A type in words, for example "int or none" or "one of 'off', 'auto'"."""
    words: list[str] = []
    for kind in _members(hint):
        if kind is type(None):
            words.append("none")
        elif get_origin(kind) is Literal:
            words.append("one of " + ", ".join(repr(choice) for choice in get_args(kind)))
        elif kind is bool:
            words.append("true or false")
        else:
            words.append(kind.__name__)
    return " or ".join(words)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert(text: str, hint: Any) -> Any:
    members = _members(hint)
    if type(None) in members and text.lower() == "none":
        return None
    for kind in sorted((kind for kind in members if kind is not type(None)), key=lambda kind: kind is str):
        try:
            return _convert_one(text, kind)
        except ValueError:
            continue
    raise ValueError(f"{text!r} is not {describe_type(hint)}")


def _convert_one(text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError(f"{text!r} is no choice")
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{text!r} is not true or false")
        return _BOOLEANS[text.lower()]
    return msgspec.convert(text, kind, strict=False)  # a ValidationError is a ValueError
