"""Checks that a rank has enough file descriptors while some are left for the report of a
shortage.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

_SPARE = 4
"""Number of descriptors kept for reporting a shortage to other ranks, and for other threads of this
process.
"""

_REMEDIES = {
    errno.EMFILE: "raise the limit (ulimit -n, now {limit})",
    errno.ENFILE: "raise the limit of the machine (sysctl fs.file-max)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A shortage of descriptors in this process."""

    free: int
    """Number of descriptors that the process can still open."""
    why: str
    """Error text: the number needed, the number free, and the remedy."""


def shortage_of(needed: int, whose: str) -> Shortage | None:
    """Returns None if this process can open `needed` files and a few more, else the shortage."""
    held: list[int] = []
    try:
        for _ in range(needed + _SPARE):
            held.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if error.errno not in _REMEDIES:
            return None  # the system may deny eventfd but permit other descriptors
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        remedy = _REMEDIES[error.errno].format(limit=limit)
        return Shortage(
            free=len(held),
            why=f"{whose} has too few descriptors left ({errno.errorcode[error.errno]}): it needs "
            f"{needed} to form this group, with {_SPARE} to spare, and can open {len(held)} more; "
            f"{remedy}, or close communicators: each keeps one descriptor open",
        )
    finally:
        for fd in held:
            os.close(fd)
    return None
