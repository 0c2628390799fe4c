"""Result files: provenance without paths or secrets, tables, plots; the GPU's gaps from a trace; steps of an engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.engine import Engine
from pegainfer_core.errors import PegainferError
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.testing.fake_runner import VOCAB_SIZE, FakeRunner
from pegainfer_server.bench import provenance
from pegainfer_server.bench.device_gaps import device_gaps, merged
from pegainfer_server.bench.plot import curves, draw, read_points
from pegainfer_server.bench.report import document, last_line, pretty, show, value_at, warnings, write
from pegainfer_server.bench.step_bench import measure_steps
from pegainfer_server.cli import main


def point(engine: str, load: float, tokens_s: float, mode: str = "closed") -> dict[str, Any]:
    times = {"p50": 1.0 + load, "p99": 2.0 + load}
    return {
        "engine": engine,
        "mode": mode,
        "load": load,
        "label": f"{load} at once",
        "shape": "8/4",
        "output_tokens_s": tokens_s,
        "ttft_ms": times,
        "tpot_ms": times,
        "itl_ms": None,
        "errors": {},
        "client": {"cpu": 0.1},
    }


def result(**changes: Any) -> dict[str, Any]:
    facts = {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "dirty": False,
        "machine": {"cpu": "A CPU"},
        "gpus": [{"name": "A GPU", "driver": "1.2"}],
    }
    points = [point("b", 8, 50.0), point("b", 1, 10.0), point("a", 1, 9.0), point("a", 2.0, 5.0, "open")]
    return document("serve", facts | changes, points=points)


def test_provenance_names_what_is_needed_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "abc123-dirty")
    flags = {"out": Path("/somewhere/x.json"), "command": ["/usr/bin/python", "--model=/data/m", "-o", "a=b"], "n": 3}
    facts = provenance.provenance("bench test", flags)
    assert facts["flags"] == {"out": "x.json", "command": ["python", "--model=m", "-o", "a=b"], "n": 3}
    assert (facts["commit"], facts["dirty"]) == ("abc123", True)
    assert {"pegainfer-core", "pegainfer-server", "numpy"} <= set(facts["versions"])
    assert facts["machine"]["cpus"] > 0
    assert facts["machine"]["id"] == provenance.machine()["id"]
    json.dumps(facts)


def test_provenance_asks_git_where_no_commit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    answers = {"rev-parse": "feed", "status": " M file"}
    monkeypatch.setattr(provenance, "output", lambda command: answers[command[3]])
    assert provenance.commit() == {"commit": "feed", "dirty": True}
    monkeypatch.setattr(provenance, "output", lambda command: None)
    assert provenance.commit() == {"commit": None, "dirty": None}


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "output", lambda command: "A GPU, 1.2, 143771, GPU-1\nA GPU, 1.2, 143771, GPU-2")
    first, second = provenance.gpus()
    assert (first["name"], first["driver"], first["memory_mib"]) == ("A GPU", "1.2", 143771.0)
    assert first["id"] != second["id"]
    monkeypatch.setattr(provenance, "output", lambda command: "10\n32")
    assert provenance.gpu_memory_mib() == 42.0
    monkeypatch.setattr(provenance, "output", lambda command: None)
    assert provenance.gpus() == []
    assert provenance.gpu_memory_mib() is None


def test_output_of_a_tool_that_is_missing_or_fails() -> None:
    assert provenance.output(["no-such-tool-anywhere"]) is None
    assert provenance.output(["false"]) is None
    assert provenance.output(["echo", "x"]) == "x"


def test_files_are_readable_and_complete(tmp_path: Path) -> None:
    content = result() | {"points": [point("a", 1, 1.0) | {"requests": {"ttft_ms": list(range(9))}}]}
    write(tmp_path / "r.json", content)
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == content
    assert '"ttft_ms": [0, 1, 2, 3, 4, 5, 6, 7, 8]' in text
    assert pretty({"a": {}, "b": [], "c": [{"d": 1}]}) == '{\n "a": {},\n "b": [],\n "c": [\n  {\n   "d": 1\n  }\n ]\n}'
    line = last_line(content)
    assert "\n" not in line and '"requests"' not in line
    assert value_at(content, "provenance.machine.cpu") == "A CPU"
    assert value_at(content, "provenance.no.such") is None


def test_table_shows_missing_values(capsys: pytest.CaptureFixture[str]) -> None:
    show("title", [{"a": "x", "b": None, "c": 12345.6}], [("A", "a"), ("B", "b"), ("C", "c")])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "12,346" in printed.err and "-" in printed.err


def test_warnings_name_failures_and_a_busy_client() -> None:
    row = point("a", 1, 1.0) | {"errors": {"HTTP 500": 2}, "client": {"cpu": 0.95}}
    failed, busy = warnings([row])
    assert "2 failed: HTTP 500" in failed
    assert "95%" in busy and "--workers" in busy


def test_plot_writes_png_and_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "r.json", result())
    assert main(["bench", "plot", str(tmp_path / "r.json"), "--out", str(tmp_path / "p"), "--title", "T"]) == 0
    assert capsys.readouterr().out.count("wrote") == 2
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "p.svg").read_text()
    assert "<svg" in svg
    points, title = read_points([tmp_path / "r.json"])
    assert title == "A GPU, driver 1.2, 2026-01-02, commit 0123456789"
    assert {name: [item["load"] for item in curve] for name, curve in curves(points).items()} == {
        "b 8/4": [1, 8],
        "a 8/4": [1],
        "a 8/4, Poisson": [2.0],
    }
    assert [file.name for file in draw(points, title, tmp_path / "q")] == ["q.png", "q.svg"]


def test_plot_takes_a_comparison_apart(tmp_path: Path) -> None:
    panels = {name: [point(engine, 1, 2.0)] for engine, name in zip("aaa", ("P1", "P2", "P3"), strict=True)}
    other = {name: [point("b", 1, 3.0)] for name in panels}
    facts = result()["provenance"]
    engines = {"a": {"engine": {}, "panels": panels}, "b": {"engine": {}, "panels": other}}
    write(tmp_path / "peer.json", document("peer comparison", facts, engines=engines))
    points, _ = read_points([tmp_path / "peer.json"])
    assert [item["engine"] for item in points] == ["a", "a", "a", "b", "b", "b"]


def test_plot_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    write(tmp_path / "a.json", result())
    write(tmp_path / "b.json", result(commit="fedcba9876543210"))
    write(tmp_path / "c.json", document("startup", {}, starts=[]))
    with pytest.raises(PegainferError, match="not of one machine and commit"):
        read_points([tmp_path / "a.json", tmp_path / "b.json"])
    with pytest.raises(PegainferError, match=r"c\.json is no result of load points"):
        read_points([tmp_path / "c.json"])
    with pytest.raises(PegainferError, match=r"gone\.json"):
        read_points([tmp_path / "gone.json"])


def test_device_gaps_of_a_trace(tmp_path: Path) -> None:
    def work(category: str, begin: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "ts": begin, "dur": duration, "name": "n"}

    events = [
        work("kernel", 0, 100),
        work("kernel", 50, 60),  # overlaps: busy until 110
        work("gpu_memcpy", 112, 8),  # a gap of 2: kernels in a row
        work("kernel", 220, 80),  # a gap of 100: the host
        work("cpu_op", 0, 1000),
        {"ph": "i", "cat": "kernel", "ts": 5, "name": "no interval"},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert device_gaps(file) == {
        "span_us": 300,
        "busy_us": 198,
        "idle_us": 100,
        "idle_share": 0.3333,
        "long_gaps": 1,
        "short_gaps_us": 2,
        "launches": 4,
    }
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert device_gaps(packed) == device_gaps(file)
    file.write_text(json.dumps({"traceEvents": [work("cpu_op", 0, 1)]}))
    assert device_gaps(file) is None
    assert merged([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]


def engine(run_ahead: bool, slots: int = 8) -> Engine:
    limits = SchedulerLimits(
        max_model_len=256,
        max_prefill_tokens=32,
        max_running_requests=slots,
        max_waiting_requests=100,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
    )
    return Engine(Scheduler(limits, KVCache(200, 16)), FakeRunner(200, 16), run_ahead=run_ahead)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_acts_of_steps_in_which_all_decode(run_ahead: bool) -> None:
    many = [[3 + index] * 40 for index in range(6)]
    fake = engine(run_ahead)
    figures = measure_steps(fake, many, 60, steps=10, traced_steps=0)
    assert (figures["rows"], figures["context"], figures["steps"]) == (6, 40, 10)
    for act in ("step_ms", "plan_ms", "launch_ms", "wait_ms", "commit_ms"):
        assert figures[act]["count"] == 10
    assert 0 < figures["host_share"] <= 1
    assert not fake.has_work


def test_steps_need_all_requests_at_once() -> None:
    with pytest.raises(PegainferError, match="never ran together"):
        measure_steps(engine(False, slots=2), [[5] * 8, [6] * 8, [7] * 8], 30, steps=5, traced_steps=0)
