"""Every hook is documented with its exact signature, and some test implements it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOOKSPECS = [
    ROOT / "pegainfer-core" / "src" / "pegainfer_core" / "hookspecs.py",
    ROOT / "pegainfer-server" / "src" / "pegainfer_server" / "hookspecs.py",
]
TEST_FILES = [path for pattern in ("pegainfer-*/tests/*.py", "tests/*.py") for path in ROOT.glob(pattern)]


def hooks() -> dict[str, str]:
    """Name and signature of every hook."""
    found = {}
    for path in HOOKSPECS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(mark) == "hookspec" for mark in node.decorator_list
            ):
                returns = ast.unparse(node.returns) if node.returns else ""
                found[node.name] = f"def {node.name}({ast.unparse(node.args)}) -> {returns}"
    return found


def test_there_are_the_hooks_of_core_and_server() -> None:
    assert set(hooks()) == {
        "pegainfer_model_families",
        "pegainfer_step_finished",
        "pegainfer_add_commands",
        "pegainfer_add_routes",
    }


def test_the_page_documents_these_hooks_and_no_others() -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### `(def .*)`$", page, flags=re.MULTILINE)) == set(hooks().values())


def test_the_relay_knows_these_hooks_and_no_others() -> None:
    from pegainfer_core.plugins import load_plugins

    plugins = load_plugins()
    for name in hooks():
        assert isinstance(plugins.implementations(name), list)
    with pytest.raises(AttributeError, match="pegainfer_no_such_hook"):
        plugins.implementations("pegainfer_no_such_hook")


@pytest.mark.parametrize("hook", hooks())
def test_a_test_implements_the_hook(hook: str) -> None:
    assert [path.name for path in TEST_FILES if f"def {hook}(" in path.read_text(encoding="utf-8")]


def test_the_page_lists_the_public_modules() -> None:
    """The same names that test_architecture.py allows a family to import."""
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    paragraph = page.partition("Public modules of core")[2].partition("\n\n")[0]
    listed = {name.replace("pegainfer_core", "") for name in re.findall(r"`([\w.]+)`", paragraph)}
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    (assigned,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC_MODULES"
    ]
    assert listed == {name.removeprefix("pegainfer_core") for name in ast.literal_eval(assigned)}
