"""docs/field-cases.md: every case has a row, and every row tests that exist or a reason why there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8")
ROWS = {
    cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
    for line in PAGE.splitlines()
    if re.match(r"\| [A-F]\d+ \|", line) and (cells := line.split("|"))
}
CASES = {
    "A": "1 2 3 5 7 8 9 10 11 12 14 15 17 18 19 21 22 23 25 26 27 28 29 31 32 34 35 36 39 40 41 42 43 44 45 46 47 49 50 51 52 53 54 56",
    "B": "1 2 4 5 6 7 8 10 11 12 13 15 16",
    "C": "1 2 3 4 5 6 7 8 9 10 11 13 15 16 18 20 21 22 23 24 25 26 28 29 30 31 32 33 34 35 37 38 40",
    "D": "1 2 3 4 6 7 8 9 10 11 15",
    "F": "1 2 4 5 6 8 9 10 12 14 15 16 18",
}
"""Numbers of the cases, by letter; some are not in use."""


@cache
def names_in(file: str) -> set[str]:
    """Names of the test functions of a module."""
    path = ROOT / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def test_every_case_has_one_row() -> None:
    wanted = [f"{letter}{number}" for letter, numbers in CASES.items() for number in numbers.split()]
    assert sorted(ROWS) == sorted(wanted)
    assert len(re.findall(r"^\| [A-F]\d+ \|", PAGE, re.MULTILINE)) == len(wanted)


@pytest.mark.parametrize("case", ROWS)
def test_a_row_names_tests_that_exist_or_says_why_there_is_none(case: str) -> None:
    symptom, choice, tests = ROWS[case]
    assert symptom
    if tests == "none":
        assert choice, "say why"
        return
    named = re.findall(r"`([\w/.-]+)::(\w+)`", tests)
    assert tests == "<br>".join(f"`{file}::{name}`" for file, name in named)
    assert named
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []
