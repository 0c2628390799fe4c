"""The command line without a model: which commands and flags there are, errors, reports, import-lightness."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pegainfer_core.plugins import BrokenPlugin
from pegainfer_server.cli import add_plugin_commands, app, expand_alias, main
from pegainfer_server.commands import doctor, generate
from pegainfer_server.commands.serve import collect_api_keys
from typer.main import get_command

ENGINE_FLAGS = [
    "--attention-backend",
    "--cuda-graphs",
    "--no-cuda-graphs",
    "--fused-ops",
    "--no-fused-ops",
    "--device",
    "--dtype",
    "--gpu-memory-utilization",
    "--ignore-config-keys",
    "--kv-cache-memory",
    "--max-model-len",
    "--max-prefill-tokens",
    "--max-running-requests",
    "--max-waiting",
    "--max-waiting-requests",
    "--no-prefix-cache",
    "--no-run-ahead",
    "--option",
    "--page-size",
    "--prefix-cache",
    "--profile-dir",
    "--revision",
    "--run-ahead",
    "--seed",
    "--state-snapshot-memory",
    "--state-snapshot-stride",
    "-o",
    "model",
]
SAMPLING_FLAGS = ["--max-tokens", "--sampling", "--temperature", "--top-k", "--top-p", "-s"]
REQUEST_FLAGS = ["--api-key", "--endpoint", "--lengths", "--model", "--out", "--seed", "--token-ids", "--url"]
REPEATED_FLAGS = [*REQUEST_FLAGS, "--keep-itl", "--no-warm-up", "--warm-up"]
FLAGS = {
    "bench latency": [*REPEATED_FLAGS, "--requests"],
    "bench plot": ["--out", "--title", "files"],
    "bench prefix": [*REQUEST_FLAGS, "--prompts", "--repeats"],
    "bench serve": [*REPEATED_FLAGS, "--concurrency", "--least", "--rate", "--rounds", "--seconds", "--workers"],
    "bench startup": [
        *("--files", "--load", "--name", "--out", "--page-cache", "--repeats"),
        *("--seed", "--timeout", "--token-ids", "--url", "command"),
    ],
    "bench step": [
        *ENGINE_FLAGS,
        *("--bench-seed", "--context", "--out", "--rows", "--steps", "--token-ids", "--traced-steps"),
    ],
    "bench throughput": [
        *ENGINE_FLAGS,
        *("--bench-seed", "--lengths", "--out", "--prompts", "--repeats", "--token-ids"),
    ],
    "bench soak": [
        *("--api-key", "--concurrency", "--margin", "--max-input", "--max-output", "--mix", "--model"),
        *("--out", "--seconds", "--seed", "--token-ids", "--url"),
    ],
    "chat": [
        *ENGINE_FLAGS,
        *SAMPLING_FLAGS,
        "--api-key",
        "--model-name",
        "--prompt",
        "--system",
        "--url",
    ],
    "doctor": ["--json"],
    "generate": [*ENGINE_FLAGS, *SAMPLING_FLAGS, "--input", "--output", "--prompt"],
    "inspect": [*ENGINE_FLAGS, "--graph", "--json"],
    "models": ["--json"],
    "serve": [
        *ENGINE_FLAGS,
        "--allowed-origins",
        "--api-key",
        "--api-key-file",
        "--generation-config",
        "--host",
        "--log-format",
        "--log-level",
        "--log-prompts",
        "--no-ui",
        "--ui",
        "--reasoning-field",
        "--max-body-size",
        "--max-requests-per-minute",
        "--no-plain-messages",
        "--otlp-traces-endpoint",
        "--plain-messages",
        "--port",
        "--served-model-name",
        "--shutdown-timeout",
        "--ssl-ca-certs",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--stall-timeout",
        "--trust-request-chat-template",
    ],
    "warmup": ENGINE_FLAGS,
}
"""The whole command line. A flag is a promise: adding one here is part of adding it."""


def subcommands(command: Any, prefix: str = "") -> dict[str, Any]:
    """Every command by its words, those of groups too."""
    found: dict[str, Any] = {}
    for name, subcommand in command.commands.items():
        if hasattr(subcommand, "commands"):
            found |= subcommands(subcommand, f"{prefix}{name} ")
        else:
            found[prefix + name] = subcommand
    return found


def test_these_are_all_commands_and_flags() -> None:
    found = {
        name: sorted(
            spelling
            for parameter in subcommand.params
            for spelling in (*parameter.opts, *parameter.secondary_opts)
            if spelling not in ("--help", "-h")
        )
        for name, subcommand in subcommands(get_command(app)).items()
    }
    assert found == {name: sorted(flags) for name, flags in FLAGS.items()}


def test_every_command_and_flag_has_help() -> None:
    for name, subcommand in subcommands(get_command(app)).items():
        assert subcommand.help, name
        for parameter in subcommand.params:
            assert parameter.help, f"{name} {parameter.name}"


def test_help_imports_nothing_heavy() -> None:
    heavy = {
        "torch",
        "transformers",
        "triton",
        "fastapi",
        "pydantic",
        "uvicorn",
        "huggingface_hub",
        "numpy",
    }
    code = (
        "import sys; from pegainfer_server.cli import main; code = main(['--help']);"
        f"found = {heavy!r} & set(sys.modules); sys.exit(f'imported {{found}}' if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
    assert "pegainfer --model-path DIR" in done.stdout


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["--model-path", "dir"], ["serve", "dir"]),
        (["--model-path=dir", "--port", "1"], ["serve", "dir", "--port", "1"]),
        (["--port", "1", "--model-path", "dir", "--seed", "2"], ["serve", "dir", "--port", "1", "--seed", "2"]),
        (["serve", "dir"], ["serve", "dir"]),
        (["chat", "--model-path", "dir"], ["chat", "--model-path", "dir"]),
        (["--help"], ["--help"]),
        (["--model-path"], ["--model-path"]),
        ([], []),
    ],
)
def test_the_model_path_alias(given: list[str], expanded: list[str]) -> None:
    assert expand_alias(given) == expanded


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command line."""
    code = main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", ["inspect", "serve"])
def test_errors_are_one_line_and_exit_code_1(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [command, str(tmp_path), *(["--port", "0", "--log-level", "error"] if command == "serve" else [])]
    code, out, err = run(capfd, *arguments)
    assert code == 1
    assert out == ""
    assert err == f"error: {tmp_path}/config.json is missing; a checkpoint directory needs it\n"


def test_usage_errors_are_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "serve", "x", "--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in err
    assert run(capfd, "no-such-command")[0] == 2
    code, _, err = run(capfd, "generate", "x")
    assert code == 2
    assert "give --prompt or --input" in err
    assert run(capfd, "chat", "x", "--url", "http://127.0.0.1:1")[0] == 2


def test_an_unknown_plugin_in_the_allow_list_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEGAINFER_PLUGINS", "no-such-plugin")
    code, _, err = run(capfd, "models")
    assert code == 1
    assert err.startswith("error: PEGAINFER_PLUGINS names no-such-plugin; installed: ")


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "--version")
    assert code == 0
    assert out.startswith("pegainfer ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--served-model-name", "a", "--served-model-name", " "], "--served-model-name must not be empty"),
        (["--max-body-size", "0"], "--max-body-size must be at least 1 byte, got 0"),
        (["--max-running-requests", "1000000000"], "--max-running-requests must be at most 4096"),
        (["--seed", str(2**63)], "--seed must be a 64-bit integer"),
    ],
)
def test_server_flags_that_make_no_sense_are_usage_errors(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capfd, "serve", "unread", *flags)
    assert code == 2
    assert message in err


def test_rows_of_input_keep_their_id(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('"a"\n{"prompt": [5], "id": 7}\n{"id": null, "prompt": "b", "seed": 3}\n')
    rows = generate.read_input(str(file), {"max_tokens": 2})
    assert [row.prompt for row in rows] == ["a", [5], "b"]
    assert [row.own for row in rows] == [{}, {"id": 7}, {"id": None}]
    assert [(row.params.max_tokens, row.params.seed) for row in rows] == [(2, None), (2, None), (2, 3)]


# API keys


def test_api_keys_come_from_flags_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\n  three  \n")
    monkeypatch.setenv("PEGAINFER_API_KEY", "four")
    assert collect_api_keys(["one", "two"], file) == ("one", "two", "three", "four")
    monkeypatch.delenv("PEGAINFER_API_KEY")
    assert collect_api_keys([], None) == ()


def test_keys_that_would_leave_the_server_open_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGAINFER_API_KEY", raising=False)
    empty = tmp_path / "keys"
    empty.write_text("\n")
    with pytest.raises(typer.BadParameter, match="holds no key"):
        collect_api_keys([], empty)
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        collect_api_keys([], tmp_path / "absent")
    for bad in ("", " x", "schl\u00fcssel"):
        with pytest.raises(typer.BadParameter, match="printable ASCII"):
            collect_api_keys([bad], None)
    monkeypatch.setenv("PEGAINFER_API_KEY", "")
    with pytest.raises(typer.BadParameter, match="not empty"):
        collect_api_keys([], None)


# plugins and reports

PLUGIN = """
from pegainfer_core.hookspecs import hookimpl

@hookimpl
def pegainfer_add_commands(app):
    @app.command()
    def greet() -> None:
        '''Say hello.'''
        print("hello from a plugin")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a distribution with one plugin module, by writing its files on the path."""

    def write(name: str, source: str) -> None:
        (tmp_path / f"site_{name}.py").write_text(source)
        info = tmp_path / f"site_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pegainfer]\n{name} = site_{name}\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in [name for name in sys.modules if name.startswith("site_")]:
        del sys.modules[name]


def test_plugins_add_commands(install: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install("greeter", PLUGIN)
    install("clumsy", PLUGIN.replace("@app.command()", "raise RuntimeError('no')"))
    monkeypatch.setenv("PEGAINFER_PLUGINS", "greeter,clumsy")
    host = typer.Typer()
    host.command()(lambda: None)
    add_plugin_commands(host)
    assert [command.callback.__name__ for command in host.registered_commands if command.callback][1:] == ["greet"]
    assert "plugin clumsy could not add its commands: RuntimeError('no')" in capfd.readouterr().err


def test_models_shows_families_and_broken_plugins(
    install: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("torn", "import no_such_module_of_anybody")
    code, out, _ = run(capfd, "models", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["families"], "the families of this repository are installed"
    assert all(family["checkpoints"] and family["tier"] for family in report["families"])
    assert [broken["name"] for broken in report["broken"]] == ["torn"]
    code, out, _ = run(capfd, "models")
    assert code == 0
    for family in report["families"]:
        assert family["name"] in out
    assert "torn: not loaded - ModuleNotFoundError" in out


FAMILY_WITH_OPTIONS = """
import dataclasses
from pegainfer_core.family import ModelFamily, SupportCard
from pegainfer_core.hookspecs import hookimpl

@dataclasses.dataclass(frozen=True)
class Options:
    depth: int = dataclasses.field(default=3, metadata={"help": "How deep to dig."})

class Family(ModelFamily):
    name = "digger"
    support = SupportCard(checkpoints=("a/hole",), attention="none", precisions=("float32",))
    options = Options

    def rejects(self, hf_config):
        return "never"

    plan = build = rejects

@hookimpl
def pegainfer_model_families():
    return [Family()]
"""


def test_models_shows_the_options_of_a_family(
    install: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("digger", FAMILY_WITH_OPTIONS)
    monkeypatch.setenv("PEGAINFER_PLUGINS", "digger")
    _, out, _ = run(capfd, "models", "--json")
    (family,) = json.loads(out)["families"]
    assert family["options"] == [{"name": "depth", "type": "int", "default": "3", "help": "How deep to dig."}]
    _, out, _ = run(capfd, "models")
    assert "-o depth=3" in out


def test_models_without_any_family(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_PLUGINS", "")
    code, out, _ = run(capfd, "models")
    assert code == 0
    assert "no family is installed" in out


# doctor

HEALTHY: dict[str, Any] = {
    "torch": {"version": "2.13.0", "built_for_cuda": None, "threads": 2, "devices": []},
    "packages": {"triton": {"installed": True, "version": "3.6.0"}, "flashinfer": {"installed": False}},
    "c_compiler": "/usr/bin/gcc",
    "caches": {
        "triton": {"folder": "/cache/triton", "kernels": 3, "bytes": 3 << 19},
        "flashinfer": {"folder": "x", "kernels": 0, "bytes": 0},
    },
}
GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "supported_by_torch": True,
    "free_bytes": 139 * 2**30,
    "total_bytes": 140 * 2**30,
}


def with_gpu(**changes: Any) -> dict[str, Any]:
    torch = {**HEALTHY["torch"], "built_for_cuda": "13.0", "devices": [{**GPU, **changes}]}
    return {**HEALTHY, "torch": torch}


def levels(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_doctor_runs_here_and_its_exit_code_says_whether_something_is_broken(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "doctor", "--json")
    findings = json.loads(out)
    names = [finding["name"] for finding in findings]
    assert names[:2] == ["python", "torch"]
    assert code == int(any(finding["level"] == "broken" for finding in findings))


def test_having_no_gpu_is_not_broken() -> None:
    findings = doctor.torch_findings(HEALTHY) + doctor.kernel_findings(HEALTHY)
    assert levels(findings) == {"torch": "ok", "gpu": "note", "triton": "ok", "flashinfer": "ok"}


def test_a_gpu_is_described() -> None:
    finding = doctor.torch_findings(with_gpu())[-1]
    assert finding.level == "ok"
    assert finding.text == "NVIDIA H200, compute capability 9.0, 139.0 of 140.0 GiB free"
    assert levels(doctor.kernel_findings(with_gpu()))["flashinfer"] == "note"


@pytest.mark.parametrize(
    ("environment", "name", "level", "advice"),
    [
        ({"error": "importing torch ended the process (exit code -11)"}, "torch", "broken", "reinstall"),
        ({"torch": {"error": "ImportError: libcudart"}}, "torch", "broken", "reinstall"),
        ({**HEALTHY, "torch": {**HEALTHY["torch"], "cuda_error": "no driver"}}, "gpu", "note", "nvidia-smi"),
        (with_gpu(supported_by_torch=False), "gpu 0", "broken", "has no kernels"),
        (with_gpu(free_bytes=2**30), "gpu 0", "note", "another process"),
    ],
)
def test_what_is_wrong_with_torch_comes_with_advice(
    environment: dict[str, Any], name: str, level: str, advice: str
) -> None:
    (finding,) = [finding for finding in doctor.torch_findings(environment) if finding.name == name]
    assert finding.level == level
    assert advice in finding.advice


def test_a_kernel_package_that_does_not_import_is_broken_where_a_gpu_needs_it() -> None:
    packages = {"triton": {"installed": True, "error": "ImportError: x"}, "flashinfer": {"installed": False}}
    assert levels(doctor.kernel_findings({**with_gpu(), "packages": packages}))["triton"] == "broken"
    assert levels(doctor.kernel_findings({**HEALTHY, "packages": packages}))["triton"] == "note"


def test_built_kernels_and_their_compiler_are_told() -> None:
    findings = {finding.name: finding for finding in doctor.kernel_findings(with_gpu())}
    assert findings["triton"].text == "3.6.0, 3 kernels built (1.5 MiB in /cache/triton)"
    assert (findings["C compiler"].level, findings["C compiler"].text) == ("ok", "/usr/bin/gcc")
    without = {finding.name: finding for finding in doctor.kernel_findings({**with_gpu(), "c_compiler": None})}
    assert without["C compiler"].level == "broken" and "gcc" in without["C compiler"].advice
    nothing = {**HEALTHY["packages"], "triton": {"installed": False}}
    absent = doctor.kernel_findings({**with_gpu(), "packages": nothing, "c_compiler": None})
    assert "C compiler" not in levels(absent)


def test_broken_plugins_and_a_missing_family_are_findings(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torn", "import no_such_module_of_anybody")
    monkeypatch.setenv("PEGAINFER_PLUGINS", "torn")
    findings = doctor.plugin_findings()
    assert levels(findings) == {"plugin torn": "broken", "families": "broken"}
    assert "uninstall dist-torn" in findings[0].advice
    monkeypatch.setenv("PEGAINFER_PLUGINS", "no-such-plugin")
    assert levels(doctor.plugin_findings()) == {"plugins": "broken"}


def test_a_driver_that_torch_cannot_use_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_findings(HEALTHY) == []
    tool.write_text("#!/bin/sh\necho 580.65.06\n")
    tool.chmod(0o755)
    (finding,) = doctor.driver_findings(HEALTHY)
    assert finding.level == "note"
    assert "CUDA build" in finding.advice
    (finding,) = doctor.driver_findings(with_gpu())
    assert (finding.level, finding.text) == ("ok", "580.65.06")
    tool.write_text("#!/bin/sh\necho driver mismatch\nexit 18\n")
    (finding,) = doctor.driver_findings(HEALTHY)
    assert (finding.level, finding.text) == ("broken", "nvidia-smi says: driver mismatch")


def test_a_broken_plugin_in_words() -> None:
    broken = BrokenPlugin("x", "pegainfer-x", "0.1", "ImportError: No module named 'fla'")
    assert str(broken) == "x: not loaded - ImportError: No module named 'fla' (pegainfer-x 0.1)"
