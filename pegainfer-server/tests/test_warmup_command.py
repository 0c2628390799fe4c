"""`pegainfer warmup`: its summary, on a CPU and as it will be on a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pegainfer_core.kernel_cache import KernelCache
from pegainfer_core.testing.fake_client import fake_info
from pegainfer_core.warm_up import WarmedUp
from pegainfer_qwen3.testing import write_tiny_qwen3
from pegainfer_server.cli import main
from pegainfer_server.commands.warmup import summary

CACHE = KernelCache(folder=Path("/cache/triton"), num_kernels=2, num_bytes=1 << 20)


def test_the_command_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_qwen3(tmp_path, num_hidden_layers=1)
    assert main(["warmup", str(path), "--kv-cache-memory", "1MiB", "--device", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert "qwen3 in float32 on cpu" in out
    assert "3 requests computed in 10 steps" in out
    assert "nothing is compiled for a CPU" in out
    assert err.splitlines() == ["weights", "kernels", "more graphs", "requests"]


def test_the_summary_counts_kernels_on_a_gpu() -> None:
    done = WarmedUp(
        info=msgspec.structs.replace(fake_info(10), device="cuda:0"),
        timeline=[("weights", 1.0), ("more graphs", 3.25)],
        before=CACHE,
        after=KernelCache(folder=CACHE.folder, num_kernels=12, num_bytes=3 << 20),
        num_requests=4,
        num_steps=14,
    )
    lines = summary(done)
    assert lines[1] == "weights 1.0 s, more graphs 3.2 s, ready 4.2 s"
    assert lines[-1] == "10 kernels compiled now, 12 in /cache/triton (3.00 MiB)"


def test_an_error_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", str(tmp_path / "nothing")]) == 1
    assert capfd.readouterr().err.startswith("error: ")
