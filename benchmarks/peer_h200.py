"""pegainfer and vLLM on one GPU, one after the other, measured by one client with the same prompts: goals P1 to P7,
and P10 with `--shape qwen35-4b`.

    python benchmarks/peer_h200.py ours --work FOLDER --out OUT       start, load, stop, start again; steps in process
    python benchmarks/peer_h200.py vllm --work FOLDER --site SITE --out OUT
    python benchmarks/peer_h200.py compare ours.json vllm.json --out FILE

Owns the panels and the order. Each engine writes one file; `compare` (peer_compare.py) refuses files that are not of one machine,
driver, commit and workload. peer_h200.sh sets a bare machine up for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peer_compare
from pegainfer_server.bench import engine_facts
from pegainfer_server.bench.client import Endpoint
from pegainfer_server.bench.prefix_bench import PREFIX_COLUMNS, run_prefix
from pegainfer_server.bench.provenance import fingerprint, provenance
from pegainfer_server.bench.report import LOAD_COLUMNS, document, finish, show, warnings
from pegainfer_server.bench.serve_bench import closed_points, open_points, run_points
from pegainfer_server.bench.server_process import ServerProcess, evict
from pegainfer_server.commands.bench_common import on_point

MODEL = "peer"
CHECKPOINT_SEED = 0
TOKEN_IDS = (1000, 32000)
MAX_MODEL_LEN = 18432
SETTLE_SECONDS = 20.0
READY_SECONDS = 420.0
LOADS = ("P1", "P2", "P3", "P10")
LARGE_PACKAGES = ("torch", "triton", "nvidia", "numpy", "vllm", "flashinfer", "transformers", "pegainfer_core")

PLAN: dict[str, Any] = {
    "P1": {"lengths": [[128, 256], [1024, 128]], "concurrency": [1], "rounds": 6, "seed": 11},
    "P2": {"lengths": [[1024, 128]], "concurrency": [8, 32, 64, 128], "rounds": 4, "seed": 12},
    "P3": {"lengths": [[1024, 128]], "rates": [16.0, 32.0], "seconds": 20.0, "seed": 13},
    "P4": {"lengths": [1024, 4096, 16384], "prompts": 2, "repeats": 10, "seed": 14},
    "P7": {"rows": "1,8,32,64,128", "context": 1024, "steps": 48, "traced_steps": 16},
}
"""The workload. `--small` shrinks it for a rehearsal on a CPU."""
SMALL: dict[str, Any] = {
    "P1": {"lengths": [[16, 8]], "concurrency": [1], "rounds": 2, "seed": 11},
    "P2": {"lengths": [[32, 8]], "concurrency": [2, 4], "rounds": 2, "seed": 12},
    "P3": {"lengths": [[32, 8]], "rates": [8.0], "seconds": 1.0, "seed": 13},
    "P4": {"lengths": [64, 256], "prompts": 1, "repeats": 3, "seed": 14},
    "P7": {"rows": "2", "context": 32, "steps": 6, "traced_steps": 2},
}


HYBRID_PLAN: dict[str, Any] = {
    "P10": {"lengths": [[1024, 128]], "concurrency": [1, 8, 16, 32], "rounds": 6, "seed": 15},
    "P4": {"lengths": [1024, 4096, 16384], "prompts": 2, "repeats": 10, "seed": 16},
    "P7": {"rows": "1,8,16,32", "context": 1024, "steps": 48, "traced_steps": 16},
}
HYBRID_SMALL: dict[str, Any] = {
    "P10": {"lengths": [[32, 8]], "concurrency": [1, 2], "rounds": 2, "seed": 15},
    "P4": {"lengths": [64, 256], "prompts": 1, "repeats": 3, "seed": 16},
    "P7": {"rows": "2", "context": 32, "steps": 6, "traced_steps": 2},
}
TINY = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"plan": PLAN, "small_plan": SMALL, "small_shape": "qwen3-60m", "vllm_flags": []},
    "qwen35-4b": {
        "plan": HYBRID_PLAN,
        "small_plan": HYBRID_SMALL,
        "small_shape": "qwen35-4b",
        "vllm_flags": ["--language-model-only"],
    },
}
"""The workload for each shape. The checkpoint has no vision tower, so vLLM is told to look for none."""


def panels(endpoint: Endpoint, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's loads and P4 against a running server."""
    ids = range(*TOKEN_IDS)
    points = {name: _points(name, load) for name, load in plan.items() if name in LOADS}
    prefix = plan["P4"]
    results: dict[str, Any] = {
        name: run_points([endpoint], some, ids, on_point=on_point) for name, some in points.items()
    }
    results["P4"] = run_prefix(
        [endpoint], prefix["lengths"], ids, num_prompts=prefix["prompts"], warm=prefix["repeats"], seed=prefix["seed"]
    )
    rows = [row for name in points for row in results[name]]
    show(f"{endpoint.name}: times in ms", rows, LOAD_COLUMNS)
    show(f"{endpoint.name}: first token", results["P4"], PREFIX_COLUMNS)
    return results


def _points(name: str, load: Mapping[str, Any]) -> list[Any]:
    if "rates" in load:
        return open_points(_shapes(load), load["rates"], load["seconds"], load["seed"])
    least = load["rounds"] if name in ("P1", "P10") else 1
    return closed_points(_shapes(load), load["concurrency"], load["rounds"], least, load["seed"])


def serve_and_measure(
    name: str, command: list[str], environment: dict[str, str], plan: Mapping[str, Any], checkpoint: Path
) -> dict[str, Any]:
    """A first start from a cold page cache, all panels, memory before and after, and the end."""
    with _port() as port:
        command = [*command, "--port", str(port)]
    root = f"http://127.0.0.1:{port}"
    evicted = evict(_large_files(checkpoint, environment))
    with ServerProcess(command, root, environment) as server:
        start: dict[str, Any] = server.wait_ready(READY_SECONDS) | {"page_cache": "cold", "evicted_bytes": evicted}
        start["timeline"] = phases(server.log_tail())
        _say(f"{name}: ready after {start['ready_s']} s")
        time.sleep(SETTLE_SECONDS)
        idle = server.memory()
        endpoint = Endpoint(name, root, MODEL)
        facts = engine_facts.ask(endpoint)
        results = panels(endpoint, plan)
        loaded = server.memory()
        stop = server.stop()
    return results | {
        "P5": [{"start": "first", **start}],
        "P6": {"idle": idle, "loaded": loaded},
        "stop": stop,
        "facts": facts,
    }


def start_again(
    name: str, command: list[str], environment: dict[str, str], state: str, files: list[Path]
) -> dict[str, Any]:
    """A further start, kernels and graphs cached on disk as the engine does, with the page cache cold or warm."""
    with _port() as port:
        command = [*command, "--port", str(port)]
    evicted = evict(files) if state == "cold" else 0  # warm: as the start before left it
    with ServerProcess(command, f"http://127.0.0.1:{port}", environment) as server:
        start = server.wait_ready(READY_SECONDS)
        _say(f"{name}: again with a {state} page cache: ready after {start['ready_s']} s")
        timeline = phases(server.log_tail())
        return {
            "start": "again",
            "page_cache": state,
            "evicted_bytes": evicted,
            "timeline": timeline,
            **start,
            **server.stop(),
        }


def phases(log: str) -> str | None:
    """The line in which our server says how long each part of its start took."""
    match = re.search(r"^.*\bready [\d.]+ s$", log, re.MULTILINE)
    return match[0] if match else None


def measure_ours(arguments: argparse.Namespace, plan: Mapping[str, Any]) -> dict[str, Any]:
    """All panels of pegainfer."""
    checkpoint = arguments.checkpoint
    program = [sys.executable, "-c", "import sys; from pegainfer_server.cli import main; sys.exit(main())"]
    flags = ["--max-model-len", str(arguments.max_model_len), *arguments.flag]
    command = [*program, "serve", str(checkpoint), "--served-model-name", MODEL, *flags]
    environment = dict(os.environ)
    results = serve_and_measure("pegainfer", command, environment, plan, arguments.checkpoint)
    files = _large_files(arguments.checkpoint, environment)
    for state in ("cold", "warm"):
        results["P5"].append(start_again("pegainfer", command, environment, state, files))
    results["P7"] = _steps(program, checkpoint, flags, plan["P7"])
    return results


def _steps(program: list[str], checkpoint: Path, flags: list[str], plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """The step loop in a process of its own; None, with a message, if it fails, so that the other panels are kept."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        given = [f"--{name.replace('_', '-')}={value}" for name, value in plan.items()]
        ids = f"--token-ids={TOKEN_IDS[0]}:{TOKEN_IDS[1]}"
        command = [*program, "bench", "step", str(checkpoint), *flags, *given, ids, "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=200)
        if done.returncode != 0:
            _say("bench step failed; there is no P7")
            return None
        content = json.loads(out.read_text(encoding="utf-8"))
        return {"steps": content["steps"], "engine": content["engines"]["pegainfer"]}


def measure_vllm(arguments: argparse.Namespace, plan: Mapping[str, Any]) -> dict[str, Any]:
    """All panels of vLLM with its defaults: prefix caching, graphs and compilation are on."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(arguments.checkpoint)]
    command += ["--served-model-name", MODEL, "--max-model-len", str(arguments.max_model_len)]
    command += ["--no-enable-log-requests", *SHAPES[arguments.shape]["vllm_flags"], *arguments.flag]
    environment = {**os.environ, "PYTHONPATH": str(arguments.site), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    results = serve_and_measure("vllm", command, environment, plan, arguments.checkpoint)
    if arguments.starts > 1:
        files = _large_files(arguments.checkpoint, environment)
        results["P5"].append(start_again("vllm", command, environment, "warm", files))
    return results


def prepare(path: Path, shape: str, changes: dict[str, Any]) -> str:
    """The checkpoint, written by a process of its own, so that this one never holds a GPU; returns its fingerprint."""
    if not (path / "model.safetensors.index.json").exists():
        begun = time.perf_counter()
        program = (
            "import json, sys; from pathlib import Path; from random_checkpoint import write_checkpoint; "
            "write_checkpoint(Path(sys.argv[1]), sys.argv[2], seed=int(sys.argv[3]), **json.loads(sys.argv[4]))"
        )
        command = [sys.executable, "-c", program, str(path), shape, str(CHECKPOINT_SEED), json.dumps(changes)]
        here = str(Path(__file__).parent)
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})
        _say(f"checkpoint written in {time.perf_counter() - begun:.1f} s")
    facts = [(path / "config.json").read_text(), str(CHECKPOINT_SEED), *sorted(file.name for file in path.iterdir())]
    return fingerprint("\n".join(facts))


def _large_files(checkpoint: Path, environment: Mapping[str, str]) -> list[Path]:
    """The checkpoint, and the large packages wherever this process and a server would import them from."""
    places = [Path(place) for place in (*sys.path, *environment.get("PYTHONPATH", "").split(os.pathsep)) if place]
    found = [place / name for place in dict.fromkeys(places) for name in LARGE_PACKAGES]
    return [checkpoint, *(path for path in found if path.is_dir())]


@contextlib.contextmanager
def _port() -> Iterator[int]:
    """A free port, free again once left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def _shapes(panel: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(prompt, output) for prompt, output in panel["lengths"]]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace) -> None:
    """Prepare, measure one engine, write its file."""
    shape = SHAPES[arguments.shape]
    plan = shape["small_plan" if arguments.small else "plan"]
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.checkpoint = arguments.work / f"checkpoint-{arguments.shape}"
    written = (shape["small_shape"], TINY) if arguments.small else (arguments.shape, {})
    checkpoint = prepare(arguments.checkpoint, *written)
    facts = provenance(f"peer_h200 {arguments.engine}", vars(arguments))
    results = (measure_ours if arguments.engine == "ours" else measure_vllm)(arguments, plan)
    workload = {
        "shape": arguments.shape,
        "plan": plan,
        "checkpoint": checkpoint,
        "token_ids": list(TOKEN_IDS),
        "max_model_len": arguments.max_model_len,
    }
    engine = results.pop("facts")
    content = document("peer", facts, workload=workload, engine=engine, panels=results)
    rows = [row for name in LOADS for row in results.get(name, [])]
    finish(content, arguments.out / f"{arguments.engine}.json", warnings(rows))


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="engine", required=True)
    for name in ("ours", "vllm"):
        command = commands.add_parser(name)
        command.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
        command.add_argument("--out", type=Path, required=True, help="folder for the result")
        command.add_argument(
            "--flag", action="append", default=[], help="further flag of the server (--flag=--name=value)"
        )
        command.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
        command.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
        command.add_argument("--small", action="store_true", help="a rehearsal: a tiny model and a few requests")
        if name == "vllm":
            command.add_argument("--site", type=Path, required=True, help="folder with vLLM's packages")
            command.add_argument("--starts", type=int, default=1, help="2 also measures a start with warm caches")
    peer_compare.add_arguments(commands.add_parser("compare"))
    arguments = parser.parse_args()
    if arguments.engine == "compare":
        sys.exit(peer_compare.run(arguments))
    measure(arguments)


if __name__ == "__main__":
    main()
