"""`.ci/run` passes on what it should, and on nothing else; the last line it prints is pytest's summary."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_ci(checkout: Path, recipe: str) -> tuple[bool, str]:
    """Whether .ci/run passes in a checkout whose `make test` is `recipe`, and its last line."""
    (checkout / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    (checkout / "Makefile").write_text(f".PHONY: test\ntest:\n\t{recipe}\n", encoding="utf-8")
    result = subprocess.run([checkout / ".ci" / "run"], capture_output=True, text=True, check=False)
    return result.returncode == 0, result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "passes", "last_line"),
    [
        ("@echo '=== 12 passed, 3 deselected in 1.5s ==='", True, "=== 12 passed, 3 deselected in 1.5s ==="),
        ("@echo '=== 1 failed, 12 passed in 1.5s ==='; exit 1", False, "=== 1 failed, 12 passed in 1.5s ==="),
        ("@echo '=== 3 deselected in 0.1s ==='", False, "no summary from pytest"),
        ("@echo '=== no tests ran in 0.1s ==='", False, "no summary from pytest"),
        ("@echo 'ruff: 1 error'; exit 1", False, "no summary from pytest"),
        ("@true", False, "no summary from pytest"),
    ],
)
def test_verdict_and_last_line(tmp_path: Path, recipe: str, passes: bool, last_line: str) -> None:
    assert run_ci(tmp_path, recipe) == (passes, last_line)


def test_make_test_runs_every_suite() -> None:
    """The suites of the Makefile, of pytest's settings and of the checkout are the same."""
    result = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/tests")} | {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/tests")
    }
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("testpaths = [")[2].partition("]")[0]
    listed = {line.strip(' ",') for line in settings.splitlines() if line.strip()}
    assert listed == found | {"tests"}
    for suite in listed:
        assert f"{suite}" in result.stdout
