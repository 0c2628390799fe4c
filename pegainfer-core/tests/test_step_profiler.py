"""--profile-dir: which steps are recorded, that recording changes no token, and what a bad folder says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pegainfer_core.errors import ConfigError
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.step_profiler import FIRST_STEP, NUM_STEPS, WARM_UP_STEPS
from pegainfer_core.testing.engine_driver import EngineDriver
from pegainfer_qwen3.testing import write_tiny_qwen3

LAST_STEP = FIRST_STEP + NUM_STEPS - 1
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no SIGUSR1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("profiled"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def keep_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def traces(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_some_steps_after_the_first_are_recorded_once(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    plain = EngineDriver(checkpoint, kv_cache_memory=1 << 20).generate([[5, 6, 7]], greedy(60))
    driver = EngineDriver(checkpoint, kv_cache_memory=1 << 20, profile_dir=str(folder))
    assert driver.generate([[5, 6, 7]], greedy(LAST_STEP - 1)) and traces(folder) == []
    assert driver.generate([[5, 6, 7]], greedy(60))[0].token_ids == plain[0].token_ids
    (name,) = traces(folder)
    assert name == f"steps-{FIRST_STEP}-{LAST_STEP}.json"
    events = json.loads((folder / name).read_text())["traceEvents"]
    assert sum(event.get("cat") == "cpu_op" for event in events) >= 10 * NUM_STEPS


def test_a_signal_records_again(checkpoint: Path, tmp_path: Path) -> None:
    driver = EngineDriver(checkpoint, kv_cache_memory=1 << 20, profile_dir=str(tmp_path))
    driver.generate([[5]], greedy(100))
    os.kill(os.getpid(), signal.SIGUSR1)
    driver.generate([[5]], greedy(100))
    first = 101 + WARM_UP_STEPS + 1  # step 101 sees the signal
    assert traces(tmp_path) == sorted([f"steps-{FIRST_STEP}-{LAST_STEP}.json", f"steps-{first}-{first + 19}.json"])


def test_a_folder_that_cannot_be_made_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--profile-dir .*file/traces cannot be made: .*Not a directory"):
        EngineDriver(checkpoint, kv_cache_memory=1 << 20, profile_dir=str(tmp_path / "file" / "traces"))


def test_steps_tell_the_times_of_their_acts(checkpoint: Path) -> None:
    from pegainfer_core.messages import AddRequest

    engine = EngineDriver(checkpoint, kv_cache_memory=1 << 20).engine
    engine.add(AddRequest("a", [5, 6], greedy(3)))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert len(steps) == 3
    assert all(step.act_seconds is not None and min(step.act_seconds) > 0 for step in steps)
    engine.add(AddRequest("b", [], greedy(3)))
    assert engine.step().act_seconds is None, "a refusal alone runs nothing"
