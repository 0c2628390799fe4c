"""Which folder keeps compiled kernels, and what is counted there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pegainfer_core.kernel_cache import c_compiler, kernel_cache, triton_cache, triton_folder, use_triton_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TRITON_CACHE_DIR", "PEGAINFER_CACHE", "CC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_default_is_in_the_users_cache(home: Path) -> None:
    assert triton_folder() == home / ".cache" / "pegainfer" / "triton"


def test_our_variable_moves_all_caches(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_CACHE", "/somewhere")
    assert triton_folder() == Path("/somewhere/triton")


def test_tritons_own_variable_wins_and_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_CACHE", "/somewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/else")
    use_triton_folder()
    assert triton_folder() == Path("/else")
    assert os.environ["TRITON_CACHE_DIR"] == "/else"


def test_triton_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "unset after the test")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    use_triton_folder()
    assert os.environ["TRITON_CACHE_DIR"] == str(home / ".cache" / "pegainfer" / "triton")


def test_counting(home: Path) -> None:
    assert triton_cache().num_kernels == 0 and triton_cache().num_bytes == 0
    for name, size in (("A/k.cubin", 10), ("A/k.json", 5), ("B/other.cubin", 7)):
        file = triton_folder() / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    found = kernel_cache(triton_folder(), "*.cubin")
    assert (found.num_kernels, found.num_bytes) == (2, 22)


def test_the_c_compiler_is_the_one_triton_takes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    assert c_compiler() is None
    for name in ("clang", "gcc"):
        (home / name).write_text("#!/bin/sh\n")
        (home / name).chmod(0o755)
        assert c_compiler() == str(home / name)
    monkeypatch.setenv("CC", sys.executable)
    assert c_compiler() == sys.executable
    monkeypatch.setenv("CC", "no-such-compiler")
    assert c_compiler() is None
