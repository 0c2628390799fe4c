"""A checkpoint's chat template: where it lies, and the sandbox that runs it with the meaning transformers 5 gives it.

Owns the jinja environment and the choice between several templates. Knows messages only as plain data. Templates are code
from a checkpoint: they run sandboxed and see nothing but JSON-like values.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pegainfer_core.checkpoint import read_json
from pegainfer_core.errors import CheckpointError
from pegainfer_core.template_time import CHECK, check_time, time_limit, with_time_checks

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, origin: str) -> None:
        """Compile; `origin` is the file, for the CheckpointError of a template that is no jinja."""
        environment = _environment()
        try:
            parsed = environment.parse(source)
            undeclared = jinja2.meta.find_undeclared_variables(parsed)
            code = environment.compile(with_time_checks(parsed))
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: the chat template is no jinja, line {error.lineno}: {error.message}"
            ) from error
        self.source = source
        self.variables = frozenset(undeclared - environment.globals.keys())
        """Names it reads from outside."""
        self._wants_parts: bool | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises jinja2.TemplateError, if it takes too long too, or whatever an expression of the template raises."""
        with time_limit():
            return self._template.render(**variables)

    def wants_parts(self, special_tokens: Mapping[str, str]) -> bool:
        """Whether it shows the content of a message only as a list of parts, never as a string. Found by trying."""
        if self._wants_parts is None:
            mark = "pegainfer-content"
            shown = [
                mark in self._try([{"role": "user", "content": content}], special_tokens)
                for content in (mark, [{"type": "text", "text": mark}])
            ]
            self._wants_parts = shown == [False, True]
        return self._wants_parts

    def _try(self, messages: list[dict[str, Any]], special_tokens: Mapping[str, str]) -> str:
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self.render({**special_tokens, **variables})
        except Exception:  # it may want a system message or the like: then nothing is known
            return ""


def find_templates(path: Path) -> dict[str, ChatTemplate]:
    """Templates of a checkpoint by name: files first, else tokenizer_config.json; empty if there are none.

    Files are chat_template.jinja (named "default") and additional_chat_templates/NAME.jinja. In tokenizer_config.json
    `chat_template` is one text or a list of {name, template}.
    """
    files = {"default": path / TEMPLATE_FILE} if (path / TEMPLATE_FILE).exists() else {}
    files |= {file.stem: file for file in sorted((path / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if files:
        return {name: ChatTemplate(_read(file), str(file)) for name, file in files.items()}
    config_file = path / "tokenizer_config.json"
    found = read_json(config_file).get("chat_template") if config_file.exists() else None
    return {name: ChatTemplate(source, str(config_file)) for name, source in _named(found, config_file).items()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _named(found: Any, file: Path) -> dict[str, str]:
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    entries = found if isinstance(found, list) else [None]
    fine = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("template"), str)]
    if len(fine) != len(entries) or not all(isinstance(entry.get("name"), str) for entry in fine):
        raise CheckpointError(f"{file}: chat_template is neither a text nor a list of name and template")
    return {entry["name"]: entry["template"] for entry in fine}


# what templates may use


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        {CHECK: check_time},
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_SafeNamespace,
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # a template may name its argument
    return datetime.datetime.now().strftime(format)


class _Dict:
    """`dict` for templates, without the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """`namespace` for templates, without names that reach into Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant says, for training. Here it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """A call block, so that names set inside stay inside, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
