"""Defaults for the threads of an engine's process, on made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pegainfer_core.cpu_settings import engine_settings, num_cores


def machine(
    root: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], allowed: set[int], quota: str | None = None
) -> Path:
    for processor, names in enumerate(siblings):
        folder = root / f"devices/system/cpu/cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(names + "\n")
    if quota is not None:
        (root / "fs/cgroup").mkdir(parents=True)
        (root / "fs/cgroup/cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)
    return root


@pytest.mark.parametrize(
    ("allowed", "quota", "cores"),
    [
        ({0, 1, 2, 3}, None, 2),
        ({0, 2}, None, 1),
        ({0, 1}, "max 100000", 2),
        ({0, 1, 2, 3}, "100000 100000", 1),
        ({0, 1, 2, 3}, "50000 100000", 1),
        ({0, 1, 2, 3}, "800000 100000", 2),
    ],
)
def test_threads_are_cores_within_affinity_and_quota(
    allowed: set[int], quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, monkeypatch, ["0,2", "1,3", "0,2", "1,3"], allowed, quota)
    assert num_cores(root) == cores
    assert engine_settings({}, root)["OMP_NUM_THREADS"] == str(cores)


def test_without_a_topology_each_processor_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores(machine(tmp_path, monkeypatch, [], {4, 5, 6})) == 3


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    no_gpu = tmp_path / "driver"

    def settings(given: dict[str, str]) -> dict[str, str]:
        return engine_settings(given, tmp_path, no_gpu)

    assert set(settings({})) == {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "GLIBC_TUNABLES"}
    for name, kept in (
        ("OMP_NUM_THREADS", "OMP_NUM_THREADS"),
        ("MKL_NUM_THREADS", "OMP_NUM_THREADS"),
        ("GOMP_SPINCOUNT", "GOMP_SPINCOUNT"),
        ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
    ):
        assert kept not in settings({name: "3"})
    assert "GLIBC_TUNABLES" not in settings({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    other = settings({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert other["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"


def test_no_huge_pages_where_a_gpu_may_compute(tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    driver.touch()
    assert set(engine_settings({}, tmp_path, driver)) == {"OMP_NUM_THREADS", "GOMP_SPINCOUNT"}
