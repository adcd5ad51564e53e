"""Resources that groups use in a process: memory mappings and open files."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path


def mappings() -> int:
    """Returns the number of this process's mappings of group memory after a garbage collection."""
    gc.collect()  # otherwise garbage of earlier tests could be freed during this test
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors() -> set[tuple[int, str]]:
    """Returns the numbers and targets of this process's open descriptors.

    A test subtracts the descriptors from before, since those of earlier tests may be closed
    meanwhile.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since the listing
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
