"""Temporary folders that do not pile up: what a killed process leaves, the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "owner.lock"


class Scratch:
    """A new temporary folder named `prefix` and something. Removed by `remove`, or, where that was
    prevented (`kill -9`), when anybody next makes one of this prefix.

    The owner holds a lock on a file in it, which the kernel drops when the owner ends: this holds
    in containers, too, where process numbers say nothing.
    """

    def __init__(self, prefix: str) -> None:
        _remove_orphans(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path / "new.lock", os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its name only when locked: nobody takes a folder that is being made for an orphan.
        os.rename(self.path / "new.lock", self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *reason: object) -> None:
        self.remove()

    def remove(self) -> None:
        """The folder with all that is in it. Never raises; a second time, it does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_orphans(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            _remove_if_orphan(folder)


def _remove_if_orphan(folder: Path) -> None:
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
