"""Sampling flags of `pegainfer chat` and `pegainfer generate`, and the text of `-s name=value` as values.

Owns which flags there are and the check of names and types against `SamplingParams`; ranges are its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer
from pegainfer_core.errors import RequestError
from pegainfer_core.sampling_params import SamplingParams

from pegainfer_server.flags import parse_pairs

MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 always takes the most likely token. Default: 1.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens that make up this much.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many most likely tokens.")]
Further = Annotated[
    list[str], typer.Option("-s", "--sampling", metavar="NAME=VALUE", help="Any other field of SamplingParams.")
]


def given_fields(
    max_tokens: int | None, temperature: float | None, top_p: float | None, top_k: int | None, further: list[str]
) -> dict[str, Any]:
    """The fields that were set, by name; values of `-s` are JSON where they can be. Raises typer.BadParameter."""
    named = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    fields: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for name, text in parse_pairs(further, "-s").items():
        if name in fields:
            raise typer.BadParameter(f"-s {name} and --{name.replace('_', '-')} say the same thing")
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text
    try:
        sampling_params(fields)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None
    return fields


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """The fields as SamplingParams. Raises RequestError naming an unknown field, a wrong type or a value out of range."""
    known = [field.name for field in msgspec.structs.fields(SamplingParams)]
    for name in fields:
        if name not in known:
            raise RequestError(f"there is no sampling field {name!r}; there are {', '.join(sorted(known))}", param=name)
    try:
        return msgspec.convert(dict(fields), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
