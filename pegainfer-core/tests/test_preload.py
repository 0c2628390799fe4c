"""What is done beside a start gives the same as without it, and its failures are silent."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_a_context_is_made_of_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Driver:
        """One device, with a context that can be made."""

        def cuInit(self, flags: int) -> int:
            calls.append("init")
            return flags

        def cuDeviceGet(self, device: Any, index: int) -> int:
            calls.append(f"device {index}")
            device._obj.value = 40 + index
            return 0 if index == 0 else 101

        def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
            calls.append(f"retain {device.value}")
            return 0

    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert preload.create_context(0) and calls == ["init", "device 0", "retain 40"]
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER", "what the user set stays"
    calls.clear()
    assert not preload.create_context(1) and calls == ["init", "device 1"]


def test_triton_and_torch_can_be_imported_at_once() -> None:
    pytest.importorskip("triton")
    code = (
        "import threading; from pegainfer_core import preload; thread = threading.Thread(target=preload.load_triton);"
        "thread.start(); preload.import_torch().join(); thread.join(); import torch; from triton.runtime import cache;"
        "assert cache.triton_key.cache_info().currsize == 1 and torch.ones(2).sum() == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


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
