"""House rules on who may import whom, checked on the real import graph and in fresh interpreters."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PLANNING_MODULES = [
    "pegainfer_core.errors",
    "pegainfer_core.config",
    "pegainfer_core.structured",
    "pegainfer_core.sampling_params",
    "pegainfer_core.messages",
    "pegainfer_core.plan",
    "pegainfer_core.request",
    "pegainfer_core.kv.pages",
    "pegainfer_core.kv.budget",
    "pegainfer_core.kv.snapshots",
    "pegainfer_core.kv.cache",
    "pegainfer_core.scheduler",
    "pegainfer_core.family",
    "pegainfer_core.hookspecs",
    "pegainfer_core.plugins",
    "pegainfer_core.client",
    "pegainfer_core.tokenizer",
    "pegainfer_core.chat",
    "pegainfer_core.checkpoint",
    "pegainfer_core.hf_config",
    "pegainfer_core.family_options",
    "pegainfer_core.resolve",
    "pegainfer_core.engine",
    "pegainfer_core.engine_loop",
    "pegainfer_core.thread_client",
    "pegainfer_core.process_client",
    "pegainfer_core.startup",
    "pegainfer_core",
]
"""Planned without torch: what the API process, the planner and plugin modules import."""

PUBLIC_MODULES = {
    "pegainfer_core",
    "pegainfer_core.chat",
    "pegainfer_core.chat_syntax",
    "pegainfer_core.config",
    "pegainfer_core.config_reader",
    "pegainfer_core.errors",
    "pegainfer_core.family",
    "pegainfer_core.hf_config",
    "pegainfer_core.hookspecs",
    "pegainfer_core.model",
    "pegainfer_core.ops",
    "pegainfer_core.rope_config",
    "pegainfer_core.routing",
    "pegainfer_core.testing",
    "pegainfer_core.tokenizer",
}
"""What a family's package may import, itself or its submodules. docs/hooks.md lists the same names."""

HEAVY = ["torch", "transformers", "triton"]

FIRST_HEAVY_IMPORT = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    heavy = [module for module in json.loads(sys.argv[2]) if module in sys.modules]
    if heavy:
        sys.exit(f"importing {name} imports {', '.join(heavy)}")
"""


def assert_light(modules: list[str]) -> None:
    """Import the modules in order in a fresh interpreter; the first one that pulls in something heavy is named."""
    command = [sys.executable, "-c", FIRST_HEAVY_IMPORT, json.dumps(modules), json.dumps(HEAVY)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_planning_never_imports_torch() -> None:
    assert_light(PLANNING_MODULES)


def test_api_process_never_imports_torch() -> None:
    modules = sorted(
        str(path.relative_to(ROOT / "pegainfer-server" / "src").with_suffix("")).replace("/", ".")
        for path in (ROOT / "pegainfer-server" / "src").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    assert "pegainfer_server.app" in modules
    assert_light(modules)


def test_plugin_modules_are_import_light() -> None:
    program = """
import sys
from pegainfer_core.plugins import load_plugins
plugins = load_plugins()
families = {family.name for family in plugins.families}
assert {"qwen3", "qwen35", "deepseek-v2-lite", "llama"} <= families, families
for family in plugins.families:
    family.rejects({"model_type": "none", "architectures": ["None"]})
    family.support, family.options
heavy = [module for module in ("torch", "transformers", "triton") if module in sys.modules]
sys.exit(f"loading the plugins imports {', '.join(heavy)}" if heavy else 0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def core_imports(path: Path) -> set[str]:
    """The modules of core that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.partition(".")[0] == "pegainfer_core"}


def is_public(module: str) -> bool:
    """Whether a family's package may import this module of core."""
    return module in PUBLIC_MODULES or any(
        module.startswith(f"pegainfer_core.{package}.") for package in ("ops", "testing")
    )


def test_families_import_public_modules_of_core_only() -> None:
    packages = ["examples/pegainfer-llama", "pegainfer-qwen3", "pegainfer-qwen35", "pegainfer-deepseek-v2-lite"]
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert len(files) > len(packages)
    private = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in core_imports(path)
        if not is_public(module)
    }
    assert private == set()
