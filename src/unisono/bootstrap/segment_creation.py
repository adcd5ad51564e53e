"""The memory that the ranks of one host share: a memfd or an unnamed file."""

from __future__ import annotations

import errno
import logging
import os
import resource
import tempfile

from unisono.errors import RendezvousError, UnisonoError
from unisono.native import create_segment

_log = logging.getLogger("unisono")

_SHARED_MEMORY = "/dev/shm"
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors for a missing resource that a file would need, too."""


def can_hold_heaps() -> bool:
    """Returns True if this process can create a memfd and has no limit of the file size, so that
    its memory can have shared heaps.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        os.close(os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError:
        return False
    return limit == resource.RLIM_INFINITY


def create(ranks: int, depth: int, buffer_bytes: int, nonce: bytes, *, heaps: bool = True) -> int:
    """Creates and initialises a group's unnamed shared memory; returns its descriptor.

    With `heaps`, a memfd ends with a shared heap for each rank. A file has no heaps.

    If the system denies memfd_create, as a sandbox's seccomp profile may, the memory is an unnamed
    file in /dev/shm, else in $TMPDIR, and a warning is logged. Raises `RendezvousError` with the
    system's answers if none of these works.
    """
    try:
        fd = os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise RendezvousError(f"memfd_create: {_said(error)}") from error
        denied = f"memfd_create is denied ({_said(error)})"
    else:
        return _laid_out(fd, ranks, depth, buffer_bytes, nonce, heaps)
    reasons = [denied]
    for folder in dict.fromkeys((_SHARED_MEMORY, tempfile.gettempdir())):
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            made = _laid_out(fd, ranks, depth, buffer_bytes, nonce, False)
        except (OSError, UnisonoError) as error:
            reasons.append(f"a file in {folder} is not possible ({_said(error)})")
        else:
            _log.warning("%s: the group's memory is an unnamed file in %s", denied, folder)
            return made
    raise RendezvousError(
        f"no memory that ranks can share: {'; '.join(reasons)}. Permit memfd_create in the sandbox "
        "(its seccomp profile), or unnamed files (O_TMPFILE) in /dev/shm or $TMPDIR, with space"
    )


def _laid_out(fd: int, ranks: int, depth: int, buffer_bytes: int, nonce: bytes, heaps: bool) -> int:
    try:
        return create_segment(ranks, depth, buffer_bytes, nonce, fd, heaps)
    except BaseException:
        os.close(fd)
        raise


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror}"
    return str(error)
