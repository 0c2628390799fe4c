"""Engine flags of the command line, generated from `EngineConfig`, so that the two cannot drift.

Owns the translation struct field -> flag (name, type, default, help from the field's docstring) and back. Imports nothing
heavy: `pegainfer --help` waits for this module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError

API_KEY_VARIABLE = "PEGAINFER_API_KEY"
BYTE_FIELDS = frozenset({"kv_cache_memory", "state_snapshot_memory"})
"""Fields that count bytes: their flags take sizes such as 4GiB."""
OTHER_NAMES = {"max_waiting_requests": "--max-waiting"}
"""Second spellings of flags."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as 512MiB, 4GiB, 1.5G or 1073741824."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(Fraction(match[1]) * _UNITS[(match[2] or "").lower()])


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Docstring below each field of a struct; Python keeps them in the source only."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            assert isinstance(following.value, ast.Constant)
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def engine_parameters() -> list[inspect.Parameter]:
    """One keyword parameter for each engine field but the model, annotated for typer."""
    docs = {name: _for_the_shell(doc) for name, doc in field_docs(EngineConfig).items()}
    hints = get_type_hints(EngineConfig)
    return [
        _parameter(field, hints[field.name], docs[field.name])
        for field in msgspec.structs.fields(EngineConfig)
        if field.name != "model"
    ]


def with_engine_flags(model_required: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function that takes `config: EngineConfig` a command that takes MODEL and every engine flag.

    With `model_required` false the function gets None where no MODEL is given; engine flags are errors then.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "config"]
        flags = engine_parameters()

        @functools.wraps(function)
        def command(model: str | None = None, **values: Any) -> None:
            engine_values = {flag.name: values.pop(flag.name) for flag in flags}
            function(config=engine_config(model, engine_values), **values)

        help_text = "Checkpoint directory, or a hub id such as Qwen/Qwen3-0.6B."
        argument = typer.Argument(metavar="MODEL", help=help_text, show_default=False)
        kind: Any = Annotated[str, argument] if model_required else Annotated[str | None, argument]
        default = inspect.Parameter.empty if model_required else None
        model = inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        parameters = [model, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *flags]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del command.__wrapped__
        return command

    return decorate


def engine_config(model: str | None, values: Mapping[str, Any]) -> EngineConfig | None:
    """The config that these flags describe; None without a model. Raises typer.BadParameter, a usage error."""
    given = dict(values, options=parse_pairs(values["options"]), ignore_config_keys=tuple(values["ignore_config_keys"]))
    if model is None:
        for field in msgspec.structs.fields(EngineConfig):
            if field.name in given and given[field.name] != _default(field):
                raise typer.BadParameter(f"{flag_name(field.name)} needs a MODEL")
        return None
    try:
        return EngineConfig(model=model, **given)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def parse_pairs(texts: list[str], flag: str = "-o") -> dict[str, str]:
    """name=value texts as a dictionary. Raises typer.BadParameter for another form or a name given twice."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{flag} takes name=value, got {text!r}")
        if name in pairs:
            raise typer.BadParameter(f"{flag} {name} is given twice")
        pairs[name] = value
    return pairs


def flag_name(field: str) -> str:
    """The flag of an engine field."""
    return "-o" if field == "options" else f"--{field.replace('_', '-')}"


def _for_the_shell(doc: str) -> str:
    """A field's docstring with flags in place of Python names."""
    for name in EngineConfig.__struct_fields__:
        if "_" in name:
            doc = re.sub(rf"\b{name}\b", flag_name(name), doc)
    return re.sub(r"\bNone\b", "unset", doc)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def _parameter(field: msgspec.structs.FieldInfo, hint: Any, doc: str) -> inspect.Parameter:
    default = _default(field)
    extra: dict[str, Any] = {"help": doc, "show_default": default not in (None, (), {})}
    names: tuple[str, ...] = (flag_name(field.name),)
    if field.name in BYTE_FIELDS:
        extra |= {"parser": parse_size, "metavar": "SIZE"}
    if get_origin(hint) is tuple:
        hint, default = list[str], []
        extra["metavar"] = "KEY"
    elif get_origin(hint) is dict:
        hint, default = list[str], []
        names = ("-o", "--option")
        extra["metavar"] = "NAME=VALUE"
    elif hint is bool or hint == bool | None:
        names = (f"{names[0]}/--no-{names[0][2:]}",)
    elif get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
        hint = hint | None
    if field.name in OTHER_NAMES:
        names = (*names, OTHER_NAMES[field.name])
    annotation = Annotated[hint, typer.Option(*names, **extra)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
