"""Folders for the sockets between processes: one for each server, all below one of the user's, and none that outlives its owner for long.

Owns their creation and the removal of those that a killed owner left. A folder is in use as long as its owner holds the lock on it, which
the system takes back however the owner ends, in whatever container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = "lock"


class IpcFolder:
    """One folder, locked until `remove` or the end of this process."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make it below `parent`, by default the user's own folder in the system's temporary one."""
        above = _private(Path(tempfile.gettempdir()) / f"pegainfer-{os.getuid()}") if parent is None else parent
        with _held(above / _LOCK):
            for folder in above.iterdir():
                if folder.is_dir():
                    _remove_if_left(folder)
            self.path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=above))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Give it back with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _private(folder: Path) -> Path:
    """The folder, made if need be; another one if somebody else could reach into it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


def _remove_if_left(folder: Path) -> None:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner died before it was whole: nobody makes one while the lock above is held
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # in use
        pass
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
