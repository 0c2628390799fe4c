"""House rules on names, docstrings and file layout that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
ALL_FILES = sorted(
    {
        path
        for folder in (*PACKAGES, "tests", "examples", "docs", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
)

SYNONYMS = {
    "seq": "request",
    "seqs": "request",
    "req": "request",
    "reqs": "request",
    "job": "request",
    "jobs": "request",
    "block": "page",
    "blocks": "page",
}
"""One word for one concept: the synonyms that may not name a thing of ours, and the word to use."""

OTHER_MEANING = {
    "pegainfer-core/src/pegainfer_core/ops": {"block", "blocks"},  # a block of threads or of a matrix
    "pegainfer-core/src/pegainfer_core/testing": {"block", "blocks"},  # a decoder block
    "pegainfer-qwen3/src": {"block", "blocks"},
    "pegainfer-qwen35/src": {"block", "blocks"},
    "pegainfer-deepseek-v2-lite/src": {"block", "blocks"},
    "examples/pegainfer-llama/src": {"block", "blocks"},
    # to block: to wait
    "pegainfer-core/src/pegainfer_core/engine_loop.py": {"block"},
    "pegainfer-core/src/pegainfer_core/engine_process.py": {"block"},
    "pegainfer-core/src/pegainfer_core/thread_client.py": {"block"},
}
"""Where a word of the list means something else than the concept it would rename."""


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and identifier of everything a module names: classes, functions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words(identifier: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase identifier."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", identifier)]


def allowed_words(path: Path) -> set[str]:
    """Synonyms that mean something else in this file."""
    relative = path.relative_to(ROOT).as_posix()
    return {word for folder, exempt in OTHER_MEANING.items() if relative.startswith(folder) for word in exempt}


def test_words_splits_identifiers() -> None:
    assert words("num_seqs") == ["num", "seqs"]
    assert words("SeqGroup") == ["seq", "group"]
    assert words("BLOCK_M") == ["block", "m"]
    assert words("sequence_hidden_RE") == ["sequence", "hidden", "re"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_word_for_one_concept(path: Path) -> None:
    exempt = allowed_words(path)
    wrong = {
        f"line {line}: {name} (say {SYNONYMS[word]})"
        for line, name in defined_names(ast.parse(path.read_text(encoding="utf-8")))
        for word in words(name)
        if word in SYNONYMS and word not in exempt
    }
    assert wrong == set()


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring is not None
    assert len(docstring) > 20, "say what the module owns"


def test_sources_are_ascii() -> None:
    """Texts in other scripts belong to tests and to what they share."""
    shipped = [path for path in SOURCES if "testing" not in path.parts]
    assert [path.relative_to(ROOT).as_posix() for path in shipped if not path.read_bytes().isascii()] == []


def test_tests_are_no_packages() -> None:
    found = [path for path in ALL_FILES if path.name == "__init__.py" and "tests" in path.relative_to(ROOT).parts]
    assert found == []


@pytest.mark.parametrize(
    ("file", "class_name"),
    [
        ("pegainfer-core/src/pegainfer_core/config.py", "EngineConfig"),
        ("pegainfer-core/src/pegainfer_core/sampling_params.py", "SamplingParams"),
    ],
)
def test_every_setting_has_a_docstring(file: str, class_name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    fields = [index for index, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert fields
    undocumented = [
        ast.unparse(body[index])
        for index in fields
        if index + 1 == len(body)
        or not isinstance(following := body[index + 1], ast.Expr)
        or not isinstance(following.value, ast.Constant)
    ]
    assert undocumented == []
