"""Pages that must say what the code does: generated ones, the API's fields, links and paths."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pegainfer_server import protocol
from pegainfer_server.body import StrictBody
from pegainfer_server.messages_api.body import MessagesBody
from pegainfer_server.responses.body import ResponsesBody

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "pegainfer-*/*.md", "examples/*/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
BODIES = [
    protocol.CompletionBody,
    protocol.ChatBody,
    protocol.TokenizeBody,
    protocol.DetokenizeBody,
    protocol.StreamOptions,
    ResponsesBody,
    MessagesBody,
]


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_api_page_names_every_field(body: type[StrictBody]) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in body.model_fields if f"`{name}`" not in page] == []


def test_api_page_names_the_routes() -> None:
    from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
    from pegainfer_server.app import create_app
    from pegainfer_server.state import ServerState

    app = create_app(ServerState(client=FakeEngineClient(fake_info(10)), model_names=("m",)))
    served = {
        f"{method.upper()} {re.sub(r'{.*}', 'NAME', path)}"
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    table = page.partition("## Routes")[2].partition("\n\nWith")[0]
    assert set(re.findall(r"`((?:GET|POST) [^`]+)`", table)) == served


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_point_at_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
    here = re.findall(r"https://github\.com/pegainfer-project/pegainfer/(?:blob|tree)/main/([^)\s#]+)", text)
    assert [target for target in here if not (ROOT / target).exists()] == []


def test_readme_tree_is_the_checkout() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("## What is in here\n\n```\n")[2].partition("```")[0]
    paths = [line.split()[0] for line in tree.splitlines()]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("pegainfer-*/pyproject.toml")}
    assert packages <= {path.rstrip("/") for path in paths}
