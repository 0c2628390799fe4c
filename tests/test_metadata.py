"""What each package says about itself is its own, true, and in the wheel that would be published."""

from __future__ import annotations

import email
import email.message
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
PROJECT_URL = "https://github.com/pegainfer-project/pegainfer"
PACKAGES = {
    "pegainfer": ".",
    "pegainfer-core": "pegainfer-core",
    "pegainfer-server": "pegainfer-server",
    "pegainfer-qwen3": "pegainfer-qwen3",
    "pegainfer-qwen35": "pegainfer-qwen35",
    "pegainfer-deepseek-v2-lite": "pegainfer-deepseek-v2-lite",
    "pegainfer-llama": "examples/pegainfer-llama",
}
CODE_PACKAGES = [name for name in PACKAGES if name != "pegainfer"]


def project(name: str) -> dict[str, Any]:
    """The [project] table of a package."""
    text = (ROOT / PACKAGES[name] / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def build_wheel(name: str, directory: Path) -> zipfile.ZipFile:
    """The wheel as it would be published."""
    builder = WheelBuilder(str(ROOT / PACKAGES[name]))
    (wheel,) = builder.build(directory=str(directory), versions=["standard"])
    return zipfile.ZipFile(wheel)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    """The METADATA file of a wheel."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_every_package_of_the_checkout_is_listed() -> None:
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for pattern in ("pyproject.toml", "pegainfer-*/pyproject.toml", "examples/*/pyproject.toml")
        for path in ROOT.glob(pattern)
    }
    assert found == set(PACKAGES.values())


def test_descriptions_differ() -> None:
    descriptions = [project(name)["description"] for name in PACKAGES]
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("name", PACKAGES)
def test_metadata_is_the_packages_own(name: str) -> None:
    table = project(name)
    assert table["name"] == name
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"
    assert table["authors"] == [{"name": "The pegainfer authors"}]
    assert set(table["urls"]) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    folder = PACKAGES[name]
    for url in table["urls"].values():
        assert url.startswith(PROJECT_URL)
        _, separator, path = url.partition("/main/")
        assert not separator or (ROOT / path).exists(), f"{url} points at nothing in the checkout"
    if folder != ".":
        assert table["urls"]["Source"] == f"{PROJECT_URL}/tree/main/{folder}"


@pytest.mark.parametrize("name", PACKAGES)
def test_versions_are_in_lockstep(name: str) -> None:
    version = project("pegainfer-core")["version"]
    table = project(name)
    assert table["version"] == version
    optional = table.get("optional-dependencies", {})
    requirements = table["dependencies"] + [line for extra in optional.values() for line in extra]
    ours = [line for line in requirements if line.startswith("pegainfer-")]
    assert [line for line in ours if not line.endswith(f"=={version}")] == []


def test_version_in_code_is_the_packages() -> None:
    import pegainfer_core

    assert pegainfer_core.__version__ == project("pegainfer-core")["version"]


def test_base_install_and_cpu_extras_name_nothing_for_cuda_only() -> None:
    table = project("pegainfer")
    assert {line.partition("==")[0] for line in table["dependencies"]} == {"pegainfer-core", "pegainfer-server"}
    extras = table["optional-dependencies"]
    families = {name.removeprefix("pegainfer-") for name in CODE_PACKAGES} - {"core", "server", "llama"}
    assert families <= set(extras)
    for extra in families | {"all"}:
        assert {line.partition("==")[0] for line in extras[extra]} <= {f"pegainfer-{family}" for family in families}
    assert len(extras["all"]) == len(families)


@pytest.mark.parametrize("name", CODE_PACKAGES)
def test_wheel_holds_the_package_and_nothing_else(name: str, tmp_path: Path) -> None:
    wheel = build_wheel(name, tmp_path)
    module = name.replace("-", "_")
    files = wheel.namelist()
    assert f"{module}/py.typed" in files
    assert {file.split("/")[0] for file in files} == {module, f"{module}-{project(name)['version']}.dist-info"}
    folder = ROOT / PACKAGES[name] / "src"
    sources = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= set(files)
    (licence,) = [file for file in files if file.endswith("/licenses/LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    fields = metadata(wheel)
    assert fields["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in (fields.get_all("Classifier") or [])
    assert str(fields.get_payload()).strip().startswith(f"# {name}")


def test_root_wheel_has_no_code(tmp_path: Path) -> None:
    wheel = build_wheel("pegainfer", tmp_path)
    assert {file.split("/")[0] for file in wheel.namelist()} == {
        f"pegainfer-{project('pegainfer')['version']}.dist-info"
    }
    fields = metadata(wheel)
    assert {"qwen3", "qwen35", "deepseek-v2-lite"} <= set(fields.get_all("Provides-Extra") or [])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("pegainfer-qwen3", "qwen3"),
        ("pegainfer-qwen35", "qwen35"),
        ("pegainfer-deepseek-v2-lite", "deepseek-v2-lite"),
        ("pegainfer-llama", "llama"),
    ],
)
def test_families_are_found_by_entry_point(name: str, family: str) -> None:
    assert project(name)["entry-points"] == {"pegainfer": {family: f"{name.replace('-', '_')}.plugin"}}


def test_licence_is_the_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
