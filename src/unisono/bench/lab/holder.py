"""What keeps one host of the lab: a program that sleeps inside it until its owner is gone.

The namespaces have no names: they last as long as somebody is inside. Standard input is a pipe
that only the owner holds, so its end, however it comes, ends the host: this program then kills
whoever is still in the host's network, and leaves. Imports the standard library only: it starts
in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

_PATIENCE_S = 5.0


def members(pid: int) -> list[int]:
    """Processes in the network of process `pid`, without itself."""
    network = os.readlink(f"/proc/{pid}/ns/net")
    return [other for other in _processes() if other != pid and _network(other) == network]


def end_members(pid: int) -> None:
    """Kill all processes in the network of process `pid` but itself, and those that they start
    meanwhile. Returns when none is left, or after some seconds."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := members(pid)) and time.monotonic() < deadline_s:
        for other in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        time.sleep(0.002)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _network(pid: int) -> str:
    """Empty for a process that has ended: a zombie is in no network."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def main(name: str, names_file: str) -> None:
    """Sets up host `name`, says so, and waits for the end of standard input."""
    for command in (
        ["hostname", name],
        ["mount", "-t", "sysfs", "none", "/sys"],  # /sys/class/net as this host has it
        ["mount", "--bind", names_file, "/etc/hosts"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    print("up", flush=True)
    sys.stdin.read()
    end_members(os.getpid())


if __name__ == "__main__":
    main(*sys.argv[1:])
