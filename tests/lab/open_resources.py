"""Open resources of a process, which a call or communicator must release."""

from __future__ import annotations

import os
import time

from time_limits import PATIENCE_S


def open_resources() -> dict[str, int]:
    """Counts the open resources of this process."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def resources_after(before: dict[str, int], timeout_s: float = PATIENCE_S) -> dict[str, int]:
    """Waits until the counts equal `before`, or until the timeout, and returns them. The kernel may
    count a joined thread for a moment.
    """
    deadline = time.monotonic() + timeout_s
    while (now := open_resources()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return now
