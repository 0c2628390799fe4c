"""The README's commands and programs run as written, where they need no network.

The model of the README is a hub id. The tests run in a directory where Qwen/Qwen3-0.6B is a tiny checkpoint, so that the
same words name it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pegainfer_qwen3.testing import write_tiny_qwen3

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen3-0.6B"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
PROGRAMS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
RUN_HERE = [line for line in COMMANDS if re.match(r"pegainfer (models|doctor|inspect|generate)\b", line)]
TESTED_BELOW = ["pegainfer serve ", "pegainfer chat ", "pip install ", "make "]
SECONDS = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's model is a directory."""
    path = tmp_path_factory.mktemp("readme")
    write_tiny_qwen3(path / MODEL)
    return path


def environment() -> dict[str, str]:
    """The environment, with the installed commands on the path and without a network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}


def run(command: list[str], directory: Path, stdin: str = "") -> str:
    """Standard output of a command that must succeed."""
    result = subprocess.run(
        command,
        cwd=directory,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def port(directory: Path) -> Iterator[int]:
    """Port of a server started by the README's command, and a flag for the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    (command,) = [line for line in COMMANDS if line.startswith("pegainfer serve ")]
    server = subprocess.Popen([*shlex.split(command), "--port", str(port)], cwd=directory, env=environment())
    try:
        wait_ready(server, port)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS) == 0


def wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Return once the server says that it is ready."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail("the server was not ready in time")


def test_every_command_is_tested_somewhere() -> None:
    assert len(COMMANDS) >= 9
    known = [line for line in COMMANDS if line in RUN_HERE or line.startswith(tuple(TESTED_BELOW))]
    assert known == COMMANDS


def test_first_lines_are_install_and_serve() -> None:
    assert COMMANDS[:2] == ["pip install 'pegainfer[qwen3]'", f"pegainfer serve {MODEL}"]


@pytest.mark.parametrize("command", RUN_HERE)
def test_command_runs(command: str, directory: Path) -> None:
    assert run(shlex.split(command), directory).strip()


def test_chat_answers(directory: Path) -> None:
    (command,) = [line for line in COMMANDS if line.startswith("pegainfer chat ")]
    assert run(shlex.split(command), directory, stdin="Hello\n").strip()


def test_installed_extras_exist() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"pip install 'pegainfer\[(\w+)\]'", README)
    assert extras
    assert set(extras) <= set(table["optional-dependencies"])


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert named == {"demo", "test"}
    assert named <= set(targets)


def test_openai_program_streams_an_answer(port: int, directory: Path) -> None:
    (program,) = [text for text in PROGRAMS if "OpenAI" in text]
    assert "127.0.0.1:8000" in program
    here = program.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    assert run([sys.executable, "-c", here], directory).strip()


def test_offline_program_prints_an_answer(directory: Path) -> None:
    (program,) = [text for text in PROGRAMS if "LLM(" in text]
    assert run([sys.executable, "-c", program], directory).strip()


def test_core_readme_shows_the_same_program() -> None:
    core = (ROOT / "pegainfer-core" / "README.md").read_text(encoding="utf-8")
    (program,) = [text for text in PROGRAMS if "LLM(" in text]
    assert program in core
