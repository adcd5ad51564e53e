"""The folder of this machine's timelines, with one file for each rank.

A process locks its file, and the kernel releases the lock when the process ends. The files of
killed processes remain, so that they can be read. If there are too many, a new timeline removes the
oldest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono import config
from unisono.errors import UnsupportedError

_SUFFIX: Final = ".timeline"
_SHARED_MEMORY: Final = Path("/dev/shm")
_MOST_ENDED: Final = 64
_LONGEST_KEPT_S: Final = 24 * 3600.0
_ENDED_SHARE: Final = 0.05
"""Maximum fraction of the file system for the files of ended processes."""
_FREE_SHARE: Final = 0.5
"""Fraction of `/dev/shm` that must remain free for programs; containers often have only 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineFile:
    """A file in the folder. `running` is true if its process has not ended. `made_s` is a Unix
    time."""

    path: Path
    pid: int
    running: bool
    made_s: float


def folders() -> tuple[Path, ...]:
    """Returns the folders that may contain timelines, the preferred folder first:
    `UNISONO_TIMELINE_DIR` if it is set, else folders in `/dev/shm` and in the directory of
    temporary files.
    """
    given = config.timeline_settings().folder
    if given:
        return (Path(given),)
    name = f"unisono-timeline-{os.geteuid()}"
    places = (_SHARED_MEMORY, Path(tempfile.gettempdir()))
    return tuple(place / name for place in places if place.is_dir())


def make_file(nbytes: int, where: Sequence[Path] | None = None) -> tuple[Path, int]:
    """Makes a locked file of `nbytes` zeros. Returns its path and its open file descriptor.

    Raises `OSError` if the folders are full or cannot be used.
    """
    failure: OSError = FileNotFoundError("no folder for timelines exists")
    for folder in folders() if where is None else where:
        try:
            _require_own(folder)
            _remove_ended(folder, nbytes)
            _require_room(folder, nbytes)
            return _made(folder, nbytes)
        except OSError as error:
            failure = error
    raise failure


def _require_own(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder}: expected a folder of this user; remove it")


def _require_room(folder: Path, nbytes: int) -> None:
    if _SHARED_MEMORY in folder.parents:
        found = os.statvfs(folder)
        if found.f_bavail * found.f_frsize - nbytes < _FREE_SHARE * found.f_blocks * found.f_frsize:
            raise OSError(errno.ENOSPC, f"{folder}: half of its file system is in use")


def _made(folder: Path, nbytes: int) -> tuple[Path, int]:
    path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # This allocates memory. Writing to a sparse file in full memory would end the process by
        # SIGBUS.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return path, descriptor


def find_files(where: Sequence[Path] | None = None) -> list[TimelineFile]:
    """Returns the files of this user's timelines on this machine, the newest last.

    >>> find_files([Path("/nowhere")])
    []
    """
    found: list[TimelineFile] = []
    for folder in folders() if where is None else where:
        for path in folder.glob(f"*{_SUFFIX}"):
            # The file may have been removed meanwhile, or may not be a timeline.
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.name.partition("-")[0])
                made_s = path.stat().st_mtime
                found.append(
                    TimelineFile(path=path, pid=pid, running=_is_locked(path), made_s=made_s)
                )
    return sorted(found, key=lambda each: each.made_s)


def files_of(pid: int, where: Sequence[Path] | None = None) -> list[TimelineFile]:
    """Returns the timelines' files of one process. Raises `UnsupportedError` if there are none.

    >>> from unisono.timeline import TimelineWriter
    >>> timeline = TimelineWriter(rank=0, size=1, events=64)
    >>> timeline.path in [each.path for each in files_of(os.getpid())]
    True
    """
    every = find_files(where)
    found = [each for each in every if each.pid == pid]
    if not found:
        known = ", ".join(str(each) for each in sorted({each.pid for each in every})) or "none"
        raise UnsupportedError(
            f"process {pid} has no timeline of this user here; processes that have one: {known}. A "
            "program has one once it makes a Controller, unless UNISONO_TIMELINE_EVENTS is 0"
        )
    return found


def files_of_jobs(job_of: Callable[[Path], str]) -> list[TimelineFile]:
    """Returns the timelines' files of all jobs with a running process on this machine, including
    the files of ended ranks.

    If no process is running, returns the files of the job that was started last. `job_of` returns
    the job of a file, and may raise `ValueError` or `OSError`. Raises `UnsupportedError` if there
    are no files.

    >>> from unisono.timeline import TimelineWriter
    >>> timeline = TimelineWriter(rank=0, size=1, events=64)
    >>> timeline.path in [each.path for each in files_of_jobs(lambda path: "the same")]
    True
    """
    found: list[tuple[str, TimelineFile]] = []
    for each in find_files():
        # The file may have been removed meanwhile, or may still be incomplete.
        with contextlib.suppress(OSError, ValueError):
            found.append((job_of(each.path), each))
    if not found:
        raise UnsupportedError(
            "no process of this user has a timeline here. A program has one once it makes a "
            "Controller, unless UNISONO_TIMELINE_EVENTS is 0"
        )
    running = {job for job, each in found if each.running} or {found[-1][0]}
    return [each for job, each in found if job in running]


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # The lock is shared, so that a reader does not mistake another reader for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_ended(folder: Path, nbytes: int) -> None:
    ended = [each for each in find_files((folder,)) if not each.running]
    oldest_s = time.time() - _LONGEST_KEPT_S
    found = os.statvfs(folder)
    share = int(_ENDED_SHARE * found.f_blocks * found.f_frsize) // nbytes
    surplus = len(ended) - min(_MOST_ENDED, share)
    for index, each in enumerate(ended):
        if index < surplus or each.made_s < oldest_s:
            each.path.unlink(missing_ok=True)
