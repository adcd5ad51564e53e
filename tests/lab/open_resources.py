"""What a process has open: what a call or a communicator must give back."""

from __future__ import annotations

import os
import time


def open_resources() -> dict[str, int]:
    """Of this process."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def settled(before: dict[str, int], timeout_s: float = 2.0) -> dict[str, int]:
    """The census, once it is what it was `before`, or after this time. A thread that was joined is
    counted until the kernel has buried it."""
    deadline = time.monotonic() + timeout_s
    while (now := open_resources()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return now
