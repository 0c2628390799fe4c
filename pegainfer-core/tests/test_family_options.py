"""Options of a family: text in, typed dataclass out, every mistake named."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from pegainfer_core.errors import ConfigError, PluginError
from pegainfer_core.family import ModelFamily, NoOptions, SupportCard
from pegainfer_core.family_options import OptionHelp, describe_options, describe_type, parse_options


@dataclasses.dataclass(frozen=True)
class Options:
    kv_page_size: int = dataclasses.field(default=16, metadata={"help": "Tokens in a page."})
    scale: float = 1.0
    batch_invariant: bool = False
    note: str = ""
    policy: Literal["off", "auto", 3] = "off"
    limit: int | None = 5

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError("scale must be above 0")


def family_with(options_class: type[Any]) -> ModelFamily:
    class Family(ModelFamily):
        name = "ant"
        support = SupportCard(checkpoints=(), attention="none", precisions=())
        options = options_class

        def rejects(self, hf_config: object) -> str | None:
            return None

        def plan(self, hf_config: object, engine_config: object, options: object) -> Any:
            raise NotImplementedError

        def build(self, plan: object, context: object) -> Any:
            raise NotImplementedError

    return Family()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ({"kv_page_size": "64"}, ("kv_page_size", 64)),
        ({"scale": "2.5"}, ("scale", 2.5)),
        ({"scale": "2"}, ("scale", 2.0)),
        ({"batch_invariant": "true"}, ("batch_invariant", True)),
        ({"batch_invariant": "Off"}, ("batch_invariant", False)),
        ({"note": "64"}, ("note", "64")),
        ({"policy": "auto"}, ("policy", "auto")),
        ({"policy": "3"}, ("policy", 3)),
        ({"limit": "none"}, ("limit", None)),
        ({"limit": "-1"}, ("limit", -1)),
    ],
)
def test_text_is_converted_by_the_field_type(text: dict[str, str], value: tuple[str, Any]) -> None:
    assert parse_options(family_with(Options), text) == dataclasses.replace(Options(), **dict([value]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            {"kv_page": "64"},
            "-o kv_page=64: ant has no option 'kv_page'; "
            "it has batch_invariant, kv_page_size, limit, note, policy, scale",
        ),
        ({"kv_page_size": "many"}, "-o kv_page_size=many: ant wants int"),
        ({"kv_page_size": "1.5"}, "-o kv_page_size=1.5: ant wants int"),
        ({"batch_invariant": "2"}, "-o batch_invariant=2: ant wants true or false"),
        ({"policy": "on"}, "-o policy=on: ant wants one of 'off', 'auto', 3"),
        ({"limit": "some"}, "-o limit=some: ant wants int or none"),
        ({"scale": "-1"}, "options of ant: scale must be above 0"),
    ],
)
def test_mistakes_are_named(text: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(family_with(Options), text)
    assert str(caught.value) == message


def test_a_family_without_options_says_so() -> None:
    assert parse_options(family_with(NoOptions), {}) == NoOptions()
    with pytest.raises(ConfigError, match="ant has no option 'x'; it has no options"):
        parse_options(family_with(NoOptions), {"x": "1"})


@dataclasses.dataclass
class Mutable:
    x: int = 1


@dataclasses.dataclass(frozen=True)
class Required:
    x: int


@dataclasses.dataclass(frozen=True)
class Complex:
    x: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("options", "reason"), [(Mutable, "frozen dataclass"), (int, "frozen"), (Required, "default"), (Complex, "type")]
)
def test_unusable_option_classes_are_plugin_errors(options: type[Any], reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        parse_options(family_with(options), {})


def test_options_in_words() -> None:
    described = describe_options(family_with(Options))
    assert described[0] == OptionHelp("kv_page_size", "int", "16", "Tokens in a page.")
    assert described[-1] == OptionHelp("limit", "int or none", "5", "")
    assert describe_options(family_with(NoOptions)) == []


def test_types_in_words() -> None:
    assert describe_type(float | None) == "float or none"
