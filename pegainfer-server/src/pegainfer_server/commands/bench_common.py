"""Flags and small helpers that the commands of `pegainfer bench` share. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pegainfer_core.errors import PegainferError

SECRET_FLAGS = frozenset({"api_key"})

Out = Annotated[Path | None, typer.Option(metavar="FILE", help="JSON file to write.")]
Seed = Annotated[
    int | None,
    typer.Option(min=0, max=2**31 - 1, help="Seed of prompts and arrivals. Default: a new one, told in the results."),
]


def parse_token_ids(text: str) -> range:
    """The ids in a text such as 1000:32000. Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"--token-ids takes FIRST:END with FIRST < END, got {text!r}")
    return range(int(match[1]), int(match[2]))


TokenIds = Annotated[
    range,
    typer.Option(parser=parse_token_ids, metavar="FIRST:END", help="Range of token ids that prompts are made of."),
]
"""Its default is a text, which the parser reads too."""


def require_extra(*packages: str) -> None:
    """Raise PegainferError naming the extra if numpy or one of these packages of it is not installed."""
    missing = [name for name in ("numpy", *packages) if importlib.util.find_spec(name) is None]
    if missing:
        raise PegainferError(f"this command needs {', '.join(missing)}: pip install 'pegainfer[bench]'")


def flags_of(context: typer.Context, **known: Any) -> dict[str, Any]:
    """What the command was given, without secrets. `known` replaces values that were decided since."""
    values: Mapping[str, Any] = {**context.params, **known}
    return {name: value for name, value in values.items() if name not in SECRET_FLAGS}


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens in a text such as 128/256,1024/128. Raises typer.BadParameter."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)/([1-9]\d*)\s*", part)
        if match is None:
            raise typer.BadParameter(f"--lengths takes IN/OUT,IN/OUT,..., got {text!r}")
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def on_point(figures: Mapping[str, Any]) -> None:
    """One line on stderr as each point ends."""
    ttft, tpot = figures["ttft_ms"] or {}, figures["tpot_ms"] or {}
    sys.stderr.write(
        f"{figures['engine']} {figures['shape']} {figures['label']}: {figures['output_tokens_s']:.0f} tok/s, "
        f"TTFT p50 {ttft.get('p50', float('nan')):.1f} ms, TPOT p50 {tpot.get('p50', float('nan')):.2f} ms, "
        f"{figures['failed']} failed\n"
    )
    sys.stderr.flush()
