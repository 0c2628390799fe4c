"""Socket folders: each its own, left ones removed, those in use never."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pegainfer_core.ipc_folder import IpcFolder

HOLD = """
import sys
from pathlib import Path
from pegainfer_core.ipc_folder import IpcFolder
print(IpcFolder(Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""


def folders(parent: Path) -> set[Path]:
    return {path for path in parent.iterdir() if path.is_dir()}


def test_a_folder_is_gone_after_its_use(tmp_path: Path) -> None:
    first, second = IpcFolder(tmp_path), IpcFolder(tmp_path)
    (first.path / "engine").touch()
    assert folders(tmp_path) == {first.path, second.path}
    assert first.path.stat().st_mode & 0o077 == 0
    first.remove()
    assert folders(tmp_path) == {second.path}
    second.remove()


def test_what_a_killed_owner_left_goes_when_the_next_one_comes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        held = Path(owner.stdout.readline().strip())
        mine = IpcFolder(tmp_path)
        assert folders(tmp_path) == {held, mine.path}
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert folders(tmp_path) == {held, mine.path}
    (tmp_path / "half-made").mkdir()
    other = IpcFolder(tmp_path)
    assert folders(tmp_path) == {mine.path, other.path}
    mine.remove()
    other.remove()


def test_a_folder_that_others_can_reach_into_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = IpcFolder()
    usual = private.path.parent
    assert usual.parent == tmp_path and usual.stat().st_mode & 0o077 == 0
    private.remove()
    usual.chmod(0o777)
    elsewhere = IpcFolder()
    assert elsewhere.path.parent != usual and elsewhere.path.parent.stat().st_mode & 0o077 == 0
    elsewhere.remove()
