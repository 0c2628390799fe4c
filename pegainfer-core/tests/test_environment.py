"""What `pegainfer doctor` asks of torch and the kernel packages, in this very installation and in broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pegainfer_core import environment


def test_the_module_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "pegainfer_core.environment"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["torch"]["version"] == torch.__version__
    assert len(facts["torch"]["devices"]) == (torch.cuda.device_count() if torch.version.cuda else 0)
    assert set(facts["packages"]) == set(facts["caches"]) == {"triton", "flashinfer"}


def test_a_package_that_does_not_import_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn_kernels.py").write_text("raise OSError('libx.so: no such file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment._package("torn_kernels") == {"installed": True, "error": "OSError: libx.so: no such file"}
    assert environment._package("no_such_kernels") == {"installed": False}


def test_built_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "kernel.cubin").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "none"))
    caches = environment.inspect_environment()["caches"]
    assert caches["triton"] == {"folder": str(tmp_path), "kernels": 1, "bytes": 0}
    assert caches["flashinfer"]["kernels"] == 0
