"""The fields of a request that say what its text must be, and the one grammar that they ask for.

Owns their names (the OpenAI API's `response_format`, vLLM's `structured_outputs` and `guided_*`) and the rule that a request has one
at most. Whether a grammar can be compiled, the engine finds out before the request runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pegainfer_core import structured
from pegainfer_core.structured import Grammar
from pydantic import Field, ValidationInfo, field_validator

from pegainfer_server.body import StrictBody
from pegainfer_server.http_errors import bad_request

Schema = dict[str, Any]
FormatType = Literal["text", "json_object", "json_schema"]


class NamedSchema(StrictBody):
    """The `json_schema` of a response format."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    """For the client; the answer does not depend on it."""
    description: str | None = None
    """For the client, too."""
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None
    """false leaves keywords that cannot be enforced out of account; otherwise they are an error."""


class ResponseFormat(StrictBody):
    """As in the OpenAI API."""

    type: FormatType
    json_schema: NamedSchema | None = None

    @field_validator("json_schema")
    @classmethod
    def _of_its_type(cls, value: NamedSchema | None, info: ValidationInfo) -> NamedSchema | None:
        if (value is not None) != (info.data.get("type") == "json_schema"):
            raise ValueError("goes with the type json_schema, and only with it")
        return value

    def grammar(self, field: str) -> Grammar | None:
        """What it asks for. Raises RequestError, also where a json_schema is missing."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise bad_request(
                    f"{field}.json_schema: this field is required", f"{field}.json_schema", "missing_field"
                )
            return schema_grammar(self.json_schema.schema_, self.json_schema.strict, f"{field}.json_schema")
        return structured.json_object(field=field) if self.type == "json_object" else None


class StructuredOutputs(StrictBody):
    """As in vLLM: exactly one of these."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    """A JSON schema, as an object or as its text."""
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's syntax, or in GBNF."""


class FormatFields(StrictBody):
    """Part of the bodies of completions and chat completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    """An older name of structured_outputs.json; likewise below."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def grammar(self) -> Grammar | None:
        """What the text must be. Raises ApiError or RequestError naming the field."""
        outputs = self.structured_outputs
        asked: dict[str, Any] = {
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
        }
        if outputs is not None:
            asked |= {f"structured_outputs.{name}": getattr(outputs, name) for name in ("regex", "choice", "grammar")}
            asked |= {"structured_outputs.json": outputs.json_, "structured_outputs.json_object": outputs.json_object}
        grammars = [_grammar(field, value) for field, value in asked.items() if value is not None]
        if outputs is not None and not any(grammar.field.startswith("structured_outputs") for grammar in grammars):
            needs = "structured_outputs: needs one of json, json_object, regex, choice and grammar"
            raise bad_request(needs, "structured_outputs", "missing_field")
        if self.response_format is not None and (formatted := self.response_format.grammar("response_format")):
            grammars.insert(0, formatted)
        if len(grammars) > 1:
            first, second = grammars[0].field, grammars[1].field
            raise bad_request(f"{second}: excludes {first}; an answer has one format", second, "invalid_value")
        return grammars[0] if grammars else None


def schema_grammar(schema: Schema, strict: bool | None, field: str) -> Grammar:
    """The grammar of a JSON schema that may or may not be strict. Raises RequestError."""
    return structured.json_schema(schema, strict=strict is not False, field=field)


def _grammar(field: str, value: Any) -> Grammar:
    kind = field.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json_object":
        return structured.json_object(field=field)
    if kind == "json":
        return (
            Grammar(kind="json_schema", text=value, field=field)
            if isinstance(value, str)
            else schema_grammar(value, None, field)
        )
    if kind == "choice":
        return structured.choice(value, field=field)
    return structured.regex(value, field=field) if kind == "regex" else structured.lark(value, field=field)
