"""What text a request may produce: a grammar, and where thinking ends that it does not bind.

Owns the specification that travels to the engine inside `SamplingParams`, and the building of grammars for forced tool calls. Knows
nothing of tokenizers or masks: `grammars.py` compiles and carries it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from pegainfer_core.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_GRAMMAR_LENGTH = 256 * 1024  # characters; the schema of a large API has about 100,000
MAX_CHOICES = 2000
JSON_WHITESPACE = r"\x20?|\n[\x20\t]{0,40}"
"""Between two parts of a JSON text: nothing, a space, or a new line with its indentation. Unbounded, a model may never leave it."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A language that the answer belongs to. Immutable and hashable: equal ones are compiled once."""

    kind: GrammarKind
    text: str = ""
    """A JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's or GBNF's syntax; empty for json_object."""
    strict: bool = True
    """json_schema only: keywords that cannot be enforced are an error; False leaves them out of account."""
    field: str = "grammar"
    """The request's field that asked for it: what an error names."""

    def __post_init__(self) -> None:
        """Raise RequestError for a text that cannot be one of its kind. Whether it compiles, the engine finds out."""
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            size = f"{self.field}: at most {MAX_GRAMMAR_LENGTH} characters are supported, got {len(self.text)}"
            raise RequestError(size, param=self.field)
        if self.kind == "json_schema":
            self._check(isinstance(self._json(), dict | bool), "a JSON schema is an object")
        elif self.kind == "choice":
            choices = self._json()
            strings = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
            self._check(strings and bool(choices), "choices are a list of strings that are not empty")
            self._check(len(choices) <= MAX_CHOICES, f"at most {MAX_CHOICES} choices are supported")
        else:
            self._check(bool(self.text) == (self.kind != "json_object"), "the text is empty")

    def _json(self) -> Any:
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestError(f"{self.field}: not valid JSON: {error}", param=self.field) from None

    def _check(self, ok: bool, wanted: str) -> None:
        if not ok:
            raise RequestError(f"{self.field}: {wanted}", param=self.field)


def json_schema(schema: Mapping[str, Any] | bool, *, strict: bool = True, field: str = "grammar") -> Grammar:
    """The JSON texts that a schema validates. Raises RequestError."""
    return Grammar(kind="json_schema", text=_dumps(schema), strict=strict, field=field)


def json_object(*, field: str = "grammar") -> Grammar:
    """Any JSON object."""
    return Grammar(kind="json_object", field=field)


def regex(pattern: str, *, field: str = "grammar") -> Grammar:
    """What a regular expression matches as a whole. No look-around, no back-references."""
    return Grammar(kind="regex", text=pattern, field=field)


def choice(choices: Sequence[str], *, field: str = "grammar") -> Grammar:
    """One of these texts. Raises RequestError."""
    return Grammar(kind="choice", text=_dumps(list(choices)), field=field)


def lark(text: str, *, field: str = "grammar") -> Grammar:
    """A grammar in Lark's syntax as llguidance reads it, or in GBNF."""
    return Grammar(kind="lark", text=text, field=field)


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer's thinking begins and ends, for a request whose prompt lets the model think; None in `SamplingParams` if not."""

    end_id: int
    """The token that ends thinking."""
    start_id: int | None = None
    """The token that begins it, unless the prompt has begun it."""
    open: bool = False
    """Whether the prompt ends inside thinking."""
    budget: int | None = None
    """Most tokens of thinking, its first and last token not counted; then the end is forced. None: no bound."""

    def __post_init__(self) -> None:
        """Raise RequestError for what can never be."""
        if self.budget is not None and self.budget < 0:
            raise RequestError(f"thinking_budget must be 0 or more, got {self.budget}", param="thinking_budget")
        if not self.open and self.start_id is None:
            raise RequestError("thinking needs a token that begins it, or a prompt that has", param="thinking_budget")


class LarkBuilder:
    """Builds a grammar from expressions: each method returns one, to be put into others; `build` makes the whole.

    For answers in a model's own syntax, such as tool calls.
    """

    def __init__(self) -> None:
        self._rules: list[str] = []

    def text(self, literal: str) -> str:
        """This very text. A token that is special in the tokenizer is no text: see `token`."""
        return _dumps(literal) if literal else '""'

    def token(self, token_id: int) -> str:
        """One token, by its id; the way to name special ones."""
        return f"<[{token_id}]>"

    def json(self, schema: Mapping[str, Any], *, strict: bool = False) -> str:
        """A JSON text that the schema validates; without `strict`, keywords that cannot be enforced are left out of account."""
        options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not strict}
        return self._rule("%json " + _dumps({**schema, "x-guidance": options}))

    def expression(self, grammar: Grammar) -> str:
        """The texts of a grammar. Raises RequestError for one that is written in Lark's syntax, which is no part of another."""
        if grammar.kind == "lark":
            what = f"{grammar.field}: a grammar in Lark's syntax excludes tools"
            raise RequestError(what, param=grammar.field)
        if grammar.kind == "json_object":
            return self.json({"type": "object"}, strict=True)
        if grammar.kind == "json_schema":
            schema = msgspec.json.decode(grammar.text)
            return self.json(schema if isinstance(schema, dict) else {}, strict=grammar.strict)
        if grammar.kind == "choice":
            return self.any_of([self.text(option) for option in msgspec.json.decode(grammar.text)])
        return self.pattern(grammar.text)

    def pattern(self, regex: str) -> str:
        """What a regular expression matches."""
        return self._rule("/" + regex.replace("/", r"\/").replace("\n", r"\n") + "/")

    def up_to(self, end: str) -> str:
        """Any text, up to and with the first `end`."""
        return self._rule(r"/(?s:.*)/", f"[suffix={_dumps(end)}]")

    def sequence(self, *parts: str) -> str:
        """One after the other."""
        return self._rule(" ".join(parts))

    def any_of(self, options: Sequence[str]) -> str:
        """Exactly one of these."""
        return self._rule(" | ".join(options))

    def optional(self, part: str) -> str:
        """Once or not at all."""
        return f"({part})?"

    def one_or_more(self, part: str, separator: str = "") -> str:
        """Repeated, with a text between two of them."""
        return self._rule(f"{part} ({self.text(separator)} {part})*" if separator else f"({part})+")

    def build(self, start: str, *, field: str = "grammar") -> Grammar:
        """The grammar whose texts are those of the expression `start`. Raises RequestError if it is too large."""
        rules = [f"start: {start}", *self._rules]
        return Grammar(kind="lark", text="%llguidance {}\n" + "\n".join(rules) + "\n", field=field)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def calls_expression(
    builder: LarkBuilder,
    calls: Sequence[str],
    *,
    parallel: bool,
    before: str = "",
    separator: str = "",
    after: str = "",
) -> str:
    """The expression of an answer that calls tools and says nothing else.

    `calls` are expressions of `builder`, one for each tool that may be called (all for required, one for a named tool); with `parallel`
    there may be several calls. `before` and `after` are expressions around all calls, `separator` is a text between two.
    """
    call = builder.any_of(calls)
    body = builder.one_or_more(call, separator) if parallel else call
    return builder.sequence(*(part for part in (before, body, after) if part))


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
