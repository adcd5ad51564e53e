"""A job on lab hosts: faults, results of the ranks, and files and processes that remain on the
hosts.
"""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import Me, Processes
from time_limits import PATIENCE_S
from unisono.bench.lab import Lab

PORT = 29_500
_ROOM = "4m"
TEMPORARY = "/mnt"
DISKS = (TEMPORARY, "/dev/shm")
"""Disks of every host; not /tmp, which may hold the project itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A rank's result, and the seconds from the fault to this result."""

    rank: int
    error: str | None
    text: str
    after_s: float

    def names(self, ranks: Sequence[int]) -> bool:
        """Returns True if the error's text names one of these ranks."""
        return names(self.text, ranks)


def names(text: str, ranks: Sequence[int]) -> bool:
    """Returns True if the text names one of these ranks."""
    return any(re.search(rf"\brank {rank}\b", text) for rank in ranks)


class Job(Processes):
    """Ranks as processes on the hosts of a lab; host h has `layout[h]` consecutive ranks.

    `env` is added to every rank's environment; `descriptors` limits the open files of a rank;
    `rendezvous` is on host 0 by default.
    """

    def __init__(
        self,
        lab: Lab,
        function: Callable[[Me], Any],
        layout: Sequence[int],
        *,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
        descriptors: Mapping[int, int] | None = None,
        rendezvous: str | None = None,
    ) -> None:
        self.lab = lab
        self.host_of = [host for host, count in enumerate(layout) for _ in range(count)]

        def environment(rank: int) -> dict[str, str]:
            return {"TMPDIR": TEMPORARY, **(env or {}), **env_of(rank)}

        def place(rank: int) -> dict[str, int | None]:
            most = (descriptors or {}).get(rank)
            return {"host": lab.host_pid(self.host_of[rank]), "descriptors": most}

        name = rendezvous or f"tcp://{lab.address(0)}:{PORT}"
        super().__init__(function, sum(layout), name=name, environment=environment, place=place)

    def ranks_on(self, *hosts: int) -> list[int]:
        """Returns the ranks of these hosts."""
        return [rank for rank, host in enumerate(self.host_of) if host in hosts]

    def others(self, ranks: Sequence[int]) -> list[int]:
        """Returns all other ranks."""
        return [rank for rank in range(self.ranks) if rank not in ranks]

    # ---- faults; each method returns the time of its fault

    def kill(self, rank: int) -> float:
        """Kills a rank; the kernel closes its connections."""
        return self.signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> float:
        """Stops a rank; the kernel still acknowledges received data."""
        return self.signal(rank, signal.SIGSTOP)

    def kill_host(self, host: int) -> float:
        """Kills all processes of a host at once."""
        happened = time.monotonic()
        self.lab.kill(host)
        return happened

    def power_off(self, host: int) -> float:
        """Makes a host silent: its connections are neither reset nor closed."""
        happened = time.monotonic()
        self.lab.power_off(host)
        return happened

    def cut(self, host: int, *, carrier: bool = True) -> float:
        """Cuts all links of a host, whose ranks stay alive. If `carrier` is false, the cables are
        unplugged.
        """
        happened = time.monotonic()
        for rail in range(self.lab.rails):
            self.lab.cut(host, rail, carrier=carrier)
        return happened

    def cut_for(self, seconds: float, host: int, *, carrier: bool = True) -> float:
        """Cuts the only link of a host for some seconds, and restores it."""
        assert self.lab.rails == 1
        happened = time.monotonic()
        self.lab.cut_for(seconds, host, carrier=carrier)
        return happened

    def ask(self, rank: int) -> float:
        """Makes a rank run the action of its program (SIGUSR1)."""
        return self.signal(rank, signal.SIGUSR1)

    # ---- results of the ranks

    def outcomes(
        self, event: str, ranks: Sequence[int], *, since: float, timeout_s: float = 40.0
    ) -> list[Outcome]:
        """Returns the result that each rank reports for the attempt with this event name (see
        `Me.attempt`).
        """
        said = self.wait_for(event, ranks, timeout_s)
        return [
            Outcome(rank=rank, error=s["error"], text=s["text"] or "", after_s=s["at"] - since)
            for rank, s in zip(ranks, said, strict=True)
        ]


# ---- the state of a host


def last_host(job: Job) -> int:
    return max(job.host_of)


def last_ranks(job: Job) -> list[int]:
    return job.ranks_on(last_host(job))


def give_disks(lab: Lab, size: str = _ROOM) -> None:
    """Mounts an empty file system of this size in place of each host's disks."""
    for host, path in itertools.product(range(lab.hosts), DISKS):
        lab.run(host, ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path])


def fill_disks(lab: Lab, host: int) -> None:
    """Fills the host's own file systems."""
    for path in DISKS:
        lab.run(host, ["sh", "-c", f"cat /dev/zero > {path}/full 2>/dev/null || true"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Objects that remain on a host: process ids, connected or listening sockets, and files on its
    own disks.
    """

    processes: tuple[int, ...]
    sockets: tuple[str, ...]
    files: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.processes or self.sockets or self.files)


def remains(lab: Lab, host: int) -> Remains:
    """Returns the objects that a job left on a host with its own disks."""
    sockets = lab.run(host, ["ss", "-Hna", "-A", "tcp,udp,unix"]).splitlines()
    files = lab.run(host, ["find", *DISKS, "-mindepth", "1"]).splitlines()
    alive = ("ESTAB", "LISTEN", "UNCONN")
    return Remains(
        processes=tuple(lab.processes(host)),
        sockets=tuple(s for s in sockets if any(state in s for state in alive)),
        files=tuple(files),
    )


def wait_for_no_remains(
    lab: Lab, hosts: Sequence[int], timeout_s: float = PATIENCE_S
) -> list[Remains]:
    """Waits until nothing remains on these hosts, or until the timeout. Returns what remains."""
    deadline = time.monotonic() + timeout_s
    while left := [found for host in hosts if (found := remains(lab, host))]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def listening(lab: Lab, host: int) -> list[tuple[str, int]]:
    """Returns the TCP addresses and ports on which the host listens."""
    lines = lab.run(host, ["ss", "-Hltn"]).splitlines()
    ends = [line.split()[3].rpartition(":") for line in lines]
    return [(address.strip("[]"), int(port)) for address, _, port in ends]


def stranger(
    lab: Lab, host: int, manner: str, address: str, port: int, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a program that is not a rank on this host; `manner` selects its behaviour (see
    `stranger.py`). `options` are those of `subprocess.Popen`.
    """
    program = str(Path(__file__).with_name("stranger.py"))
    return lab.start(
        host, [sys.executable, "-I", "-S", program, manner, address, str(port)], **options
    )


def mend_all(lab: Lab) -> None:
    """Repairs all links."""
    for host in range(lab.hosts):
        for rail in range(lab.rails):
            lab.mend(host, rail)
