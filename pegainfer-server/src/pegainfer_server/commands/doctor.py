"""`pegainfer doctor`: what this machine has, what is broken, and what to do about it.

Owns the findings and their advice. Torch is asked in a process of its own (`pegainfer_core.environment`); this one never
imports it. Works without a GPU: having none is not broken.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from pegainfer_core.plugins import Plugins

Level = Literal["ok", "note", "broken"]
_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "red")}
MINIMUM_PYTHON = (3, 11)
ENVIRONMENT_SECONDS = 120
DRIVER_SECONDS = 20
GIB = 2**30
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: Level
    text: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation.

    Looks at Python, torch, GPU, kernels and plugins, and says what to do. Exit code 1 if something is broken.
    """
    findings = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    raise typer.Exit(int(any(finding.level == "broken" for finding in findings)))


def examine() -> list[Finding]:
    """All findings, in the order of the layers: interpreter, torch, device, kernels, plugins."""
    environment = ask_environment()
    return [
        python_finding(),
        *torch_findings(environment),
        *driver_findings(environment),
        *kernel_findings(environment),
        *plugin_findings(),
    ]


def ask_environment() -> dict[str, Any]:
    """What `pegainfer_core.environment` says, or {"error": ...} if it could not."""
    command = [sys.executable, "-m", "pegainfer_core.environment"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENVIRONMENT_SECONDS, check=False)
        if done.returncode == 0:
            facts: dict[str, Any] = json.loads(done.stdout)
            return facts
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took more than {ENVIRONMENT_SECONDS} s"}
    except ValueError:
        return {"error": f"it printed {done.stdout[:80]!r}"}
    last = (done.stderr.strip() or "no message").splitlines()[-1]
    return {"error": f"importing torch ended the process (exit code {done.returncode}): {last}"}


def python_finding() -> Finding:
    """The interpreter."""
    text = f"{platform.python_version()} at {sys.executable} on {platform.system()} {platform.machine()}"
    if sys.version_info < MINIMUM_PYTHON:
        return Finding("python", "broken", text, "install Python 3.11 or later")
    return Finding("python", "ok", text)


def torch_findings(environment: dict[str, Any]) -> list[Finding]:
    """Torch and its devices."""
    torch = environment.get("torch", environment)
    if "error" in torch:
        return [Finding("torch", "broken", torch["error"], "reinstall it: pip install --force-reinstall torch")]
    built = torch["built_for_cuda"]
    version = f"{torch['version']} ({f'CUDA {built}' if built else 'CPU only'}, {torch['threads']} threads)"
    findings = [Finding("torch", "ok", version)]
    if "cuda_error" in torch:
        advice = "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; --device cpu works meanwhile"
        findings.append(Finding("gpu", "note", f"none usable: {torch['cuda_error']}", advice))
    elif not torch["devices"]:
        findings.append(Finding("gpu", "note", "none; models are served on the CPU"))
    return findings + [_device_finding(device) for device in torch["devices"]]


def _device_finding(device: dict[str, Any]) -> Finding:
    free, total = device["free_bytes"] / GIB, device["total_bytes"] / GIB
    capability = f"compute capability {device['compute_capability']}"
    text = f"{device['name']}, {capability}, {free:.1f} of {total:.1f} GiB free"
    name = f"gpu {device['index']}"
    if not device["supported_by_torch"]:
        return Finding(name, "broken", text, f"this torch has no kernels for {capability}; install one that has")
    if free < 0.5 * total:
        return Finding(name, "note", text, "another process holds most of the memory; see nvidia-smi")
    return Finding(name, "ok", text)


def driver_findings(environment: dict[str, Any]) -> list[Finding]:
    """NVIDIA's driver, where its tool is."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("driver", "broken", f"nvidia-smi does not answer: {error}", "reload or reinstall the driver")]
    if done.returncode != 0:
        text = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        return [Finding("driver", "broken", f"nvidia-smi says: {text}", "reload or reinstall the driver")]
    version = done.stdout.split()[0] if done.stdout.split() else "unknown"
    torch = environment.get("torch", {})
    if "error" not in torch and torch and torch["built_for_cuda"] is None:
        advice = "to use the GPU install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return [Finding("driver", "note", f"{version}, but torch is built for CPU only", advice)]
    return [Finding("driver", "ok", version)]


def kernel_findings(environment: dict[str, Any]) -> list[Finding]:
    """Triton and FlashInfer, and how many of their kernels are built."""
    if "packages" not in environment:
        return []
    has_gpu = bool(environment["torch"].get("devices"))
    findings: list[Finding] = []
    for name, package in environment["packages"].items():
        cache = environment["caches"][name]
        if "error" in package:
            advice = "reinstall the cuda extra: pip install --force-reinstall 'pegainfer[cuda]'"
            findings.append(Finding(name, "broken" if has_gpu else "note", package["error"], advice))
        elif package["installed"]:
            text = f"{package['version'] or 'version unknown'}, {cache['kernels']} kernels built"
            if cache["kernels"]:
                text += f" ({cache['bytes'] / MIB:.1f} MiB in {cache['folder']})"
            findings.append(Finding(name, "ok", text))
        elif has_gpu:
            findings.append(Finding(name, "note", "not installed", "for speed: pip install 'pegainfer[cuda]'"))
        else:
            findings.append(Finding(name, "ok", "not installed; not needed on a CPU"))
    if has_gpu and environment["packages"]["triton"]["installed"]:
        findings.append(_compiler_finding(environment["c_compiler"]))
    return findings


def _compiler_finding(path: str | None) -> Finding:
    if path is not None:
        return Finding("C compiler", "ok", path)
    advice = "install gcc (apt install gcc), or set CC; without one use --attention-backend torch --no-fused-ops"
    return Finding("C compiler", "broken", "none found, and Triton's kernels need one to start", advice)


def plugin_findings(plugins: Plugins | None = None) -> list[Finding]:
    """Plugins in use and broken ones."""
    from pegainfer_core.errors import PluginError
    from pegainfer_core.plugins import ALLOW_LIST_VARIABLE, load_plugins

    try:
        plugins = plugins or load_plugins()
    except PluginError as error:
        return [Finding("plugins", "broken", str(error), f"correct {ALLOW_LIST_VARIABLE}")]
    findings = [Finding(f"plugin {name}", "ok", " ".join(plugins.origin(name))) for name in plugins.names]
    for broken in plugins.broken:
        advice = f"update or uninstall {broken.distribution}, or leave it out with {ALLOW_LIST_VARIABLE}"
        text = f"{broken.reason} ({broken.distribution} {broken.version})"
        findings.append(Finding(f"plugin {broken.name}", "broken", text, advice))
    if not plugins.families:
        advice = "install a family, for example an extra of pegainfer"
        findings.append(
            Finding("families", "broken", "none is installed and working, so no model can be served", advice)
        )
    return findings


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark, style = _MARKS[finding.level]
        table.add_row(Text(mark, style), Text(finding.name), Text(finding.text))
        if finding.advice:
            table.add_row("", "", Text(f"-> {finding.advice}", style="bold"))
    Console().print(table)
