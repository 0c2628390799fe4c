"""How the C kernels come to be: made once, kept, and done without. What they compute is tested beside their callers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pegainfer_core.kernel_cache import c_compiler
from pegainfer_core.ops import cpu_native
from pegainfer_core.ops.cpu_native import kernels
from pegainfer_core.ops.norm import rms_norm

needs_compiler = pytest.mark.skipif(c_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    kernels.cache_clear()
    yield tmp_path / "cpu"
    kernels.cache_clear()


@needs_compiler
def test_each_type_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels(dtype) is not None
        assert kernels(dtype) is kernels(dtype)
    files = sorted(folder.iterdir())
    assert [file.suffix for file in files] == [".so", ".so"], "and nothing else is left behind"
    kernels.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **settings: pytest.fail("compiled again"))
    assert kernels(torch.float32) is not None
    assert kernels(torch.float16) is None, "a type without kernels"


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native, "c_compiler", lambda: None)
    assert kernels(torch.float32) is None
    torch.testing.assert_close(rms_norm(torch.ones(2, 8), torch.ones(8), 0.0), torch.ones(2, 8))


@pytest.mark.parametrize("command", ["false", "true"])
def test_a_compiler_that_makes_nothing_is_told_once(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.which(command)
    assert path is not None
    monkeypatch.setattr(cpu_native, "c_compiler", lambda: path)
    assert kernels(torch.float32) is None
    torch.testing.assert_close(rms_norm(torch.ones(2, 8), torch.ones(8), 0.0), torch.ones(2, 8))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no C kernels for this CPU, torch does it all"
    ]
