"""The scripts in benchmarks/ that need no GPU: they run at a small size, and comparisons refuse what cannot be compared."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.tokenizer import load_tokenizer
from pegainfer_qwen3.testing import write_tiny_qwen3

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SECONDS = 200


def run(*arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The last line of stdout as JSON, and stderr, of a script that must end with `code`."""
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {}, done.stderr


def script(name: str, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    return run(str(BENCHMARKS / name), *arguments, code=code)


def load_row(label: str, tokens_s: float, time: float, failed: int = 0) -> dict[str, Any]:
    times = {"p50": time, "p99": time}
    return {
        "shape": "1024/128",
        "label": label,
        "failed": failed,
        "output_tokens_s": tokens_s,
        "ttft_ms": times,
        "tpot_ms": times,
        "itl_ms": times,
    }


def peer_file(time: float, tokens_s: float, ready: float, **changes: Any) -> dict[str, Any]:
    """A result as peer_h200.py writes it."""
    facts = {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "dirty": False,
        "machine": {"id": "m"},
        "gpus": [{"id": "g", "driver": "1"}],
        "python": "3.12.3",
        "versions": {"torch": "2.11.0"},
    }
    panels = {
        "P1": [load_row("1 at once", tokens_s, time)],
        "P2": [load_row("8 at once", tokens_s, time)],
        "P3": [load_row("16 requests/s", tokens_s, time)],
        "P4": [{"input_tokens": 16384, "warm_ttft_ms": {"p50": time}}],
        "P5": [{"start": "first", "page_cache": "cold", "ready_s": ready}],
        "P6": {"idle": {"rss_mib": 1000.0}, "loaded": {"rss_mib": 2000.0}},
        "P7": {"steps": [{"rows": 128, "gpu": {"idle_share": 0.02}}]},
    }
    engine = {"version": "1"}
    return {"schema": 1, "kind": "peer", "provenance": facts | changes, "workload": {"plan": {}}, "engine": engine} | {
        "panels": panels
    }


def compare(tmp_path: Path, ours: dict[str, Any], peer: dict[str, Any], code: int = 0) -> tuple[dict[str, Any], str]:
    for name, content in (("ours", ours), ("vllm", peer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = [str(tmp_path / f"{name}.json") for name in ("ours", "vllm")]
    return script("peer_h200.py", "compare", *files, "--out", str(tmp_path / "peer.json"), code=code)


def test_comparison_gives_a_ratio_for_each_goal(tmp_path: Path) -> None:
    ours, peer = peer_file(1.0, 130.0, 5.0), peer_file(2.0, 100.0, 80.0)
    del peer["panels"]["P7"]
    compare(tmp_path, ours, peer)
    content = json.loads((tmp_path / "peer.json").read_text())
    rows = [(row["goal"], row["ratio"], row["wanted"], row["reached"]) for row in content["ratios"]]
    assert rows == [
        ("P1", 0.5, "<= 0.68x", "yes"),
        ("P2", 1.3, ">= 1.25x", "yes"),
        ("P2", 0.5, "<= 1x", "yes"),
        ("P3", 0.5, "<= 0.7x", "yes"),
        ("P3", 0.5, "<= 0.7x", "yes"),
        ("P4", 0.5, "<= 0.28x", "no"),
        ("P5", 0.0625, "<= 10", "yes"),
        ("P6", 1.0, "<= 1431", "yes"),
        ("P6", 1.0, "<= 1431", "no"),
        ("P7", None, "<= 0.03", "yes"),
    ]
    assert content["provenance"]["commit"] == "abc"
    assert set(content["engines"]) == {"pegainfer", "vllm"}


def test_comparison_of_a_hybrid_shape(tmp_path: Path) -> None:
    ours, peer = peer_file(1.0, 101.0, 5.0), peer_file(2.0, 100.0, 80.0)
    for file in (ours, peer):
        file["panels"]["P10"] = file["panels"].pop("P2")
        del file["panels"]["P1"], file["panels"]["P3"]
    compare(tmp_path, ours, peer)
    content = json.loads((tmp_path / "peer.json").read_text())
    rows = [(row["goal"], row["ratio"], row["wanted"], row["reached"]) for row in content["ratios"]]
    assert rows[:2] == [("P10", 1.01, ">= 1x", "yes"), ("P10", 0.5, "<= 1x", "yes")]
    assert [row[0] for row in rows[2:]] == ["P4", "P5", "P6", "P6", "P7"]


def test_comparison_as_a_table(tmp_path: Path) -> None:
    for name, content in (("ours", peer_file(1.0, 130.0, 5.0)), ("vllm", peer_file(2.0, 100.0, 80.0))):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    command = [sys.executable, str(BENCHMARKS / "peer_h200.py"), "compare", "--markdown", "ours.json", "vllm.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=SECONDS, check=True)
    lines = done.stdout.splitlines()
    assert "| P1 | 1024/128, 1 stream: TPOT p50 ms | 1 | 2 | 0.5 | <= 0.68x | yes |" in lines
    assert lines[-1].startswith("| P7 | GPU idle share at batch 128 | 0.02 | - | - |")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"commit": "def"}, "provenance.commit"),
        ({"dirty": True}, "provenance.dirty"),
        ({"machine": {"id": "other"}}, "provenance.machine"),
        ({"gpus": [{"id": "g", "driver": "2"}]}, "provenance.gpus"),
        ({"versions": {"torch": "2.12.0"}}, "provenance.versions"),
    ],
)
def test_comparison_refuses_runs_that_differ(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    _, err = compare(tmp_path, peer_file(1.0, 100.0, 5.0), peer_file(1.0, 100.0, 5.0, **change), code=1)
    assert f"cannot be compared: {named}" in err
    assert not (tmp_path / "peer.json").exists()


def test_comparison_refuses_another_workload_and_tells_failures(tmp_path: Path) -> None:
    ours = peer_file(1.0, 100.0, 5.0)
    other = copy.deepcopy(ours)
    other["workload"] = {"plan": {"P1": {}}}
    _, err = compare(tmp_path, ours, other, code=1)
    assert "workload" in err
    failed = copy.deepcopy(ours)
    failed["panels"]["P2"][0]["failed"] = 3
    _, err = compare(tmp_path, ours, failed, code=1)
    assert "vllm, P2, 8 at once: 3 requests failed" in err


def test_http_layer_over_an_instant_engine(tmp_path: Path) -> None:
    out = tmp_path / "http.json"
    last, _ = script("http_layer.py", "--concurrency", "4", "--rounds", "2", "--seconds", "1", "--out", str(out))
    assert [(row["engine"], row["failed"]) for row in last["points"]] == [
        ("arriving", 0),
        ("waves", 0),
        ("saturated", 0),
    ]
    assert all(row["tokens"]["events"] == row["tokens"]["output"] for row in last["points"]), "an event for each token"
    assert str(tmp_path) not in out.read_text()


def test_a_thousand_streams_are_neither_lost_nor_mixed_up_and_leave_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "streams.json"
    last, _ = script("streams.py", "--streams", "1000", "--rounds", "4", "--tokens", "8", "--out", str(out))
    rounds = last["rounds"]
    assert [(row["complete"], row["lost"], row["mixed_up"]) for row in rounds] == [(1000, 0, 0)] * 4
    assert all(set(row["gauges_after"].values()) == {0.0} for row in rounds)
    used = rounds[0]["rss_end_mib"] - rounds[0]["rss_before_mib"]
    kept = rounds[-1]["rss_after_mib"] - rounds[0]["rss_after_mib"]  # the first round warms up
    assert used > 16, "a thousand open streams take memory"
    assert kept < 6, "what fragments"
    assert abs(rounds[-1]["objects_after"] - rounds[0]["objects_after"]) < 100, (
        "3,000 streams later the same objects live"
    )
    assert str(tmp_path) not in out.read_text()


def test_cost_of_structured_output(tmp_path: Path) -> None:
    model = write_tiny_qwen3(tmp_path / "model")
    sizes = ("--streams", "2", "--tokens", "4", "--repeats", "1")
    last, _ = script("structured.py", str(model), *sizes, "--out", str(tmp_path / "out.json"))
    assert [(row["case"], len(row["rates"]["bound"])) for row in last["points"]] == [("greedy", 1), ("drawn", 1)]
    assert all(row["ratio"] > 0 for row in last["points"])


def test_planning_grid_and_its_plot(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    last, _ = script("growth.py", "plan", "--running", "1,4", "--contexts", "20", "--steps", "5", "--out", str(out))
    assert [(row["running"], row["plan_us"]["count"]) for row in last["grid"]] == [(1, 5), (4, 5)]
    done = subprocess.run([sys.executable, str(BENCHMARKS / "growth.py"), "draw", str(out)], check=False)
    assert done.returncode == 0
    assert {file.name for file in tmp_path.iterdir()} == {"growth.json", "growth.png", "growth.svg"}


def test_startup_command_measures_a_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    out = tmp_path / "startup.json"
    bench = ["-m", "pegainfer_server.cli", "bench", "startup", "--url", f"http://127.0.0.1:{port}", "--out", str(out)]
    flags = ["--load", "2,16/4", "--token-ids", "300:500", "--page-cache", "cold", "--files", str(BENCHMARKS)]
    server = [sys.executable, str(BENCHMARKS / "http_layer.py"), "--serve", str(port)]
    last, _ = run(*bench, *flags, "--", *server)
    (start,) = last["starts"]
    assert 0 < start["answers_s"] <= start["ready_s"]
    assert start["page_cache_bytes"] > 0
    assert start["idle"]["processes"] == 1
    assert start["idle"]["rss_mib"] > 10
    assert start["load"]["failed"] == 0
    assert start["loaded"]["rss_mib"] > 10
    assert str(BENCHMARKS) not in out.read_text()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_startup_command_shows_why_a_server_ended(tmp_path: Path) -> None:
    program = "raise SystemExit('no such luck')"
    bench = ["-m", "pegainfer_server.cli", "bench", "startup", "--url", "http://127.0.0.1:9"]
    _, err = run(*bench, "--", sys.executable, "-c", program, code=1)
    assert "the server ended (exit code 1)" in err
    assert "no such luck" in err


@pytest.mark.parametrize(("shape", "layers"), [("qwen3-60m", 1), ("qwen35-4b", 4)])
def test_random_checkpoint_has_a_tokenizer_of_its_vocabulary(shape: str, layers: int, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from random_checkpoint import write_checkpoint; "
        f"write_checkpoint(Path(sys.argv[1]), '{shape}', num_hidden_layers={layers}, hidden_size=16, vocab_size=5000)"
    )
    run("-c", program, str(tmp_path / "model"))
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.vocab_size == 5000
    assert tokenizer.decode([4999]).isascii()
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"


def test_every_table_of_the_performance_section_names_its_file() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Performance\n")[2].partition("\n## ")[0]
    paragraphs = section.strip().split("\n\n")
    unnamed = [
        table
        for before, table in itertools.pairwise(paragraphs)
        if table.startswith("|") and "benchmarks/results/" not in before
    ]
    assert unnamed == []
    files = re.findall(r"benchmarks/results/[\w.-]+[\w]", section)
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
