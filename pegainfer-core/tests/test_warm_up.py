"""What `pegainfer warmup` does, in order, and what it says was done."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pegainfer_core import startup
from pegainfer_core import warm_up as module
from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.errors import CheckpointError, PegainferError
from pegainfer_core.kernel_cache import triton_folder
from pegainfer_core.messages import EngineInfo, LoadProgress
from pegainfer_core.testing.corrupt import drop_tensor
from pegainfer_core.warm_up import LONG_PROMPT, warm_up
from pegainfer_qwen3.testing import write_tiny_qwen3


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    path = write_tiny_qwen3(tmp_path / "model", num_hidden_layers=1)
    return EngineConfig(model=str(path), kv_cache_memory=1 << 20)


def test_it_starts_prepares_and_computes(config: EngineConfig) -> None:
    seen: list[LoadProgress] = []
    done = warm_up(config, seen.append)
    phases = list(dict.fromkeys(report.phase for report in seen))
    assert phases == ["weights", "kernels", "more graphs", "requests"]
    assert (seen[-1].done, seen[-1].total) == (3, 3)
    assert [phase for phase, _ in done.timeline][-2:] == ["more graphs", "requests"]
    assert done.num_requests == 3 and done.num_steps == 4 + 4 + 2
    assert done.info.family == "qwen3"
    assert done.after.folder == triton_folder() and done.after.num_kernels == 0


def test_what_the_runner_can_prepare_is_prepared(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    start = startup.start_engine
    left = ["b", "a"]

    def start_with_graphs(*arguments: object) -> tuple[Engine, EngineInfo]:
        engine, info = start(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(engine.runner, "prepare_more", lambda: bool(left and left.pop()))
        return engine, info

    monkeypatch.setattr(module, "start_engine", start_with_graphs)
    seen: list[LoadProgress] = []
    warm_up(config, seen.append)
    assert left == []
    assert [report.done for report in seen if report.phase == "more graphs"] == [0, 1, 2]


def test_on_a_gpu_a_long_context_is_computed_too(config: EngineConfig) -> None:
    known = warm_up(config, lambda _: None).info
    gpu = msgspec.structs.replace(known, device="cuda:0", max_model_len=40_000, num_pages=10_000)
    assert [len(request.prompt_ids) for request in module._requests(gpu)] == [40, 40, 40, LONG_PROMPT]
    small = msgspec.structs.replace(gpu, num_pages=20)
    assert [len(request.prompt_ids) for request in module._requests(small)] == [40, 40, 40, 20 * 16 - 4]


def test_errors_are_those_of_a_start(config: EngineConfig) -> None:
    drop_tensor(Path(config.model), "model.norm.weight")
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        warm_up(config, lambda _: None)


def test_a_failing_request_fails_the_warm_up(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    start = startup.start_engine

    def start_broken(*arguments: object) -> tuple[Engine, EngineInfo]:
        engine, info = start(*arguments)  # type: ignore[arg-type]

        def launch(plan: object) -> None:
            raise RuntimeError("no kernel image")

        monkeypatch.setattr(engine.runner, "launch", launch)
        return engine, info

    monkeypatch.setattr(module, "start_engine", start_broken)
    with pytest.raises(PegainferError, match=r"a request of the warm-up failed: .*no kernel image"):
        warm_up(config, lambda _: None)
