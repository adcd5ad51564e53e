"""Whether a rank has descriptors left for a group: looked at while it can still tell the others."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

_SPARE = 4
"""To tell the others by, and for what other threads open meanwhile."""

_CURES = {
    errno.EMFILE: "raise the limit (ulimit -n, now {limit})",
    errno.ENFILE: "raise the limit of the machine (sysctl fs.file-max)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Of descriptors, in this process."""

    free: int
    """How many it can still open."""
    why: str
    """For an error: what needs how many, how many there are, and what would help."""


def lack_of(needed: int, whose: str) -> Lack | None:
    """None if this process can open `needed` files and a few more, to form a group by.

    >>> lack_of(3, "rank 0") is None
    True
    >>> print(lack_of(1 << 31, "rank 0").why)  # doctest: +SKIP
    rank 0 has too few descriptors left (EMFILE): to form this group it opens 3 ...
    """
    held: list[int] = []
    try:
        for _ in range(needed + _SPARE):
            held.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if error.errno not in _CURES:
            return None  # whoever opens something else may be permitted to
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        cure = _CURES[error.errno].format(limit=limit)
        return Lack(
            free=len(held),
            why=f"{whose} has too few descriptors left ({errno.errorcode[error.errno]}): it needs "
            f"{needed} to form this group, with {_SPARE} to spare, and can open {len(held)} more; "
            f"{cure}, or close communicators, each of which keeps one open",
        )
    finally:
        for fd in held:
            os.close(fd)
    return None
