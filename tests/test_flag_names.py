"""Every flag that a text of ours names exists: errors, help and docstrings tell people what to type."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pegainfer_server.cli import app
from typer.main import get_command

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    "pegainfer-core",
    "pegainfer-server",
    "pegainfer-qwen3",
    "pegainfer-qwen35",
    "pegainfer-deepseek-v2-lite",
    "examples/pegainfer-llama",
]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package / "src").rglob("*.py"))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
FURTHER = {"--help", "--model-path"}
"""Not among a command's own flags: see `cli`."""
OTHER_PROGRAMS = re.compile(r"git |pip install|--query-gpu")
"""Texts with flags that are not ours."""


def spellings(command: Any) -> Iterator[str]:
    """Every spelling of every flag of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from spellings(inner)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_flag_that_is_named_exists(path: Path) -> None:
    known = {*spellings(get_command(app)), *FURTHER}
    texts = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value  # prose, no argument list
    ]
    named = {flag for text in texts if not OTHER_PROGRAMS.search(text) for flag in FLAG.findall(text)}
    assert named - known == set()
