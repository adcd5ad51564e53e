"""Time limits and CPU times for tests on machines that also run other programs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_BUSY_FACTOR = float(os.environ.get("UNISONO_TESTS_BUSY_FACTOR", "3"))
"""Factor by which a busy machine may be slower. `benchmarks/faults.py` sets it to 1."""
_TASKS = Path("/proc/self/task")


def limit_s(seconds: float) -> float:
    """Returns a test's time limit for an action that takes at most `seconds` on an idle machine."""
    return seconds * _BUSY_FACTOR


def threads() -> set[str]:
    """Returns the kernel's thread ids of this process."""
    return {task.name for task in _TASKS.iterdir()}


def cpu_times(threads: set[str]) -> dict[str, float]:
    """Returns the CPU seconds of these threads of this process. Omits threads that have ended."""
    found = {}
    for each in threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[each] = int((_TASKS / each / "schedstat").read_text().split()[0]) / 1e9
    return found


def cpu_since(before: dict[str, float]) -> float:
    """Returns the CPU seconds that each thread has used since `cpu_times`, for threads that still
    run.
    """
    return sum(spent - before[each] for each, spent in cpu_times(set(before)).items())
