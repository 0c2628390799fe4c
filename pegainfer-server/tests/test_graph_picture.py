"""`pegainfer inspect --graph`: a well-formed picture with every operation in it, and errors for wrong files."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pegainfer_qwen3.testing import write_tiny_qwen3
from pegainfer_server.cli import main

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def picture(checkpoint: Path) -> ElementTree.Element:
    file = checkpoint / "step.svg"
    assert main(["inspect", str(checkpoint), "--dtype", "float32", "--graph", str(file)]) == 0
    return ElementTree.fromstring(file.read_text(encoding="utf-8"))


def texts(picture: ElementTree.Element, style: str) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text") if text.get("class") == style]


def test_the_head_says_what_it_is(picture: ElementTree.Element) -> None:
    assert texts(picture, "title") == ["qwen3, one decode step in float32: 1 row, 1024 tokens each"]


def test_repeated_layers_are_drawn_once(picture: ElementTree.Element) -> None:
    names = texts(picture, "name")
    (frame,) = [name for name in names if name.startswith("layer x 4")]
    assert re.fullmatch(r"layer x 4, [\d.]+ [KM]iB in all", frame)
    places = [text for text in texts(picture, "faint") if text.startswith("layers.")]
    assert places and {place.split(".")[1] for place in places} == {"0"}
    assert names[-1] == "greedy"


def test_shares_of_the_traffic_add_up(picture: ElementTree.Element) -> None:
    shares = [
        float(match[1])
        for text in picture.iter(f"{SVG}text")
        if (match := re.search(r", ([\d.]+) %$", text.text or ""))
    ]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_everything_is_inside(picture: ElementTree.Element) -> None:
    width, height = float(picture.get("width", "0")), float(picture.get("height", "0"))
    for box in picture.iter(f"{SVG}rect"):
        assert float(box.get("x", "0")) + float(box.get("width", "0")) <= width
        assert float(box.get("y", "0")) + float(box.get("height", "0")) <= height
    numbers = [float(n) for path in picture.iter(f"{SVG}path") for n in re.findall(r"[\d.]+", path.get("d", ""))]
    assert numbers and min(numbers) >= 0 and max(numbers) <= max(width, height)


def test_other_formats_are_refused(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--graph", "step.png"]) == 2
    assert "only SVG pictures are drawn" in re.sub(r"\s+", " ", capfd.readouterr().err)


def test_a_file_that_cannot_be_written_is_named(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "nothing" / "step.svg"
    assert main(["inspect", str(checkpoint), "--graph", str(file)]) == 1
    assert f"error: --graph {file} cannot be written: No such file or directory" in capfd.readouterr().err
