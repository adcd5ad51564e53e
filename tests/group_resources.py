"""What a process has of groups: mappings of their memory, and open files."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def mappings() -> int:
    """How many mappings of groups' memory this process has, but for those of garbage."""
    gc.collect()  # what earlier tests have left must not go in the midst of this one
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
