"""Time limits and CPU times for tests on machines that also run other programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_IDLE = "UNISONO_TESTS_ON_IDLE_MACHINE" in os.environ
"""True if the limits are those of an idle machine. `benchmarks/faults.py` sets this variable."""
_BUSY_FACTOR = 1.0 if _IDLE else 3.0
"""Factor by which a busy machine may be slower."""
_STALL_S = 0.0 if _IDLE else 15.0
"""Seconds for which a machine may run none of a test's threads, as virtual machines do now and
then.
"""
PATIENCE_S = 40.0
"""Seconds after which a test fails that waits for something that must happen at some time. They
are no limit of the library.
"""
_TASKS = Path("/proc/self/task")


def limit_s(seconds: float) -> float:
    """Returns a test's time limit for an action that takes at most `seconds` on an idle machine.

    For up to 4 `seconds`, the limit is below the timeouts of the tests' groups (30 s and more). So
    an action that ends only by such a timeout exceeds the limit.
    """
    return seconds * _BUSY_FACTOR + _STALL_S


def with_longer_timeouts(
    run: Callable[[float], T], is_too_early: Callable[[T], bool], *, first_s: float
) -> T:
    """Returns the result of `run(timeout_s)`, for ranks that all wait until a timeout.

    On a busy machine a rank may begin only after the others have timed out. Then the result is too
    early, and the ranks run again with a timeout that is four times as long, up to twice.
    """
    for factor in (1, 4):
        found = run(first_s * factor)
        if not is_too_early(found):
            return found
    return run(first_s * 16)


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
