"""The process that keeps one host of the lab alive: it sleeps inside the host until its owner ends.

The namespaces have no names, so they exist only while a process is inside. Standard input is a pipe
that only the owner has open. When the owner ends in any way, the pipe ends; this program then kills
all processes in the host's network and exits. It imports only the standard library, so it starts in
20 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

_KILL_TIMEOUT_S = 5.0


def members(pid: int) -> list[int]:
    """Returns the processes in the network of process `pid`, except `pid` itself."""
    network = os.readlink(f"/proc/{pid}/ns/net")
    return [other for other in _processes() if other != pid and _network(other) == network]


def end_members(pid: int) -> None:
    """Kills all processes in the network of process `pid` except `pid` itself, also processes that
    start meanwhile. Returns when none is left, or after a timeout."""
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while (found := members(pid)) and time.monotonic() < deadline_s:
        for other in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        time.sleep(0.002)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _network(pid: int) -> str:
    """Returns the network of a process; empty for a process that has ended (a zombie has no
    network)."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def main(name: str, names_file: str) -> None:
    """Sets up host `name`, prints "up", and waits for the end of standard input."""
    for command in (
        ["hostname", name],
        ["mount", "-t", "sysfs", "none", "/sys"],  # so that /sys/class/net is that of this host
        ["mount", "--bind", names_file, "/etc/hosts"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    print("up", flush=True)
    sys.stdin.read()
    end_members(os.getpid())


if __name__ == "__main__":
    main(*sys.argv[1:])
