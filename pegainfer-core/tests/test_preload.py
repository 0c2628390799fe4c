"""What is done beside a start gives the same as without it, and its failures are silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pegainfer_core import preload
from pegainfer_qwen3.testing import write_tiny_qwen3


def test_importing_the_module_imports_no_torch_and_the_thread_does() -> None:
    code = (
        "import sys; from pegainfer_core.preload import import_torch;"
        "assert 'torch' not in sys.modules; import_torch().join(); assert 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such call")
def test_read_ahead_covers_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_qwen3(tmp_path, shard_bytes=100_000)
    (tmp_path / "other.safetensors").write_bytes(b"of another export")
    monkeypatch.setattr(preload, "READ_AHEAD_STEP", 65536)
    asked: dict[int, int] = {}

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        inode = os.fstat(descriptor).st_ino
        assert asked.get(inode, 0) == offset
        asked[inode] = offset + length

    monkeypatch.setattr(os, "posix_fadvise", advise)
    thread = preload.read_ahead(tmp_path)
    assert thread is not None
    thread.join()
    shards = {file.stat().st_ino: file.stat().st_size for file in tmp_path.glob("model-*.safetensors")}
    assert len(shards) > 2
    assert asked.keys() == shards.keys()
    assert all(asked[inode] >= size for inode, size in shards.items())


def test_failures_are_left_to_who_needs_the_result(tmp_path: Path) -> None:
    thread = preload.read_ahead(tmp_path / "nothing")
    if thread is not None:
        thread.join()
    preload.wake_device("cuda:999").join()
    preload.wake_device("nonsense").join()
