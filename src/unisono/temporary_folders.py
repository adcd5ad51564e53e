"""Makes temporary folders, and deletes those that killed processes have left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "owner.lock"


class TemporaryFolder:
    """A new temporary folder whose name begins with `prefix`.

    `remove` deletes the folder. If the process is killed first (`kill -9`), the next process that
    makes a folder with this prefix deletes it.

    The owner locks a file in the folder. The kernel releases the lock when the owner ends. The lock
    also works in containers, where process numbers of two containers can be equal.
    """

    def __init__(self, prefix: str) -> None:
        _remove_orphans(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path / "new.lock", os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The file gets its final name only when it is locked, so other processes do not delete an
        # unfinished folder.
        os.rename(self.path / "new.lock", self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *reason: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Deletes the folder and its contents. Never raises; a second call does nothing."""
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
