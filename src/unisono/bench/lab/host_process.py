"""The program that keeps one host of the lab alive. It sleeps in the host's namespaces until its
owner, the process that created the lab, ends.

The namespaces have no names, so they exist only while a process runs in them. Standard input is a
pipe that only the owner has open. When the owner ends for any reason, the pipe is closed. This
program then kills all processes in the host's network namespace and exits. It imports only the
standard library, so it starts in 20 ms.
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
    """Returns the processes in the network namespace of process `pid`, except `pid` itself."""
    network = os.readlink(f"/proc/{pid}/ns/net")
    return [other for other in _processes() if other != pid and _network(other) == network]


def end_members(pid: int) -> None:
    """Kills all processes in the network namespace of process `pid` except `pid` itself. Repeats
    this until no process is left, or until a timeout."""
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while (found := members(pid)) and time.monotonic() < deadline_s:
        for other in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        time.sleep(0.002)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _network(pid: int) -> str:
    """Returns the network namespace of a process, or an empty text if the process has ended. A
    zombie has no namespace."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def main(name: str, names_file: str) -> None:
    """Sets up host `name`, prints "up", and waits until standard input is closed."""
    for command in (
        ["hostname", name],
        ["mount", "-t", "sysfs", "none", "/sys"],  # shows this host's interfaces
        ["mount", "--bind", names_file, "/etc/hosts"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    print("up", flush=True)
    sys.stdin.read()
    end_members(os.getpid())


if __name__ == "__main__":
    main(*sys.argv[1:])
