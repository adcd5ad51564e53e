"""Measures the memory that unexpected messages use at their receiver.

Rank 0 waits for rank 1, which is slow. Meanwhile rank 2 sends all its messages to rank 0. Then rank
0 receives and checks these messages. The kernel counts the largest growth of rank 0's resident
memory (VmHWM), which includes shared memory.

As a program, this file is one of these ranks. `p2p.py` starts the ranks on one host or on two lab
hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np

import unisono
from unisono.bench.lab import Lab

RANKS = 3
HOSTS = (0, 1, 1)
PORT = 29_450
WAIT_S = 5.0
"""Delay of rank 1: longer than all messages need to be sent and stored."""
END_S = 120.0
_TAG, _STEP = 7, 1009


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The messages that rank 2 sends."""

    messages: int
    nbytes: int

    def message(self, number: int) -> Any:
        """Returns a message whose first element differs from those of all other messages."""
        return np.arange(self.nbytes // 8, dtype=np.int64) + number * _STEP


LOADS = (Load(messages=48, nbytes=8 << 20), Load(messages=98_304, nbytes=4 << 10))
QUICK_LOADS = (LOADS[0], Load(messages=8_192, nbytes=4 << 10))


def measure(loads: tuple[Load, ...]) -> dict[str, Any]:
    """Measures all loads on one host and on two hosts."""
    rows = []
    for load in loads:
        rows.append({"hosts": 1, **asdict(load), **_run(load, None)})
        with Lab(hosts=2) as lab:
            rows.append({"hosts": 2, **asdict(load), **_run(load, lab)})
    return {"rows": rows}


def _run(load: Load, lab: Lab | None, wait_s: float = WAIT_S) -> dict[str, Any]:
    """Returns rank 0's results, or the reason of a failure in the entry `error`."""
    rendezvous = f"p2p-memory-{os.getpid()}" if lab is None else f"tcp://{lab.address(0)}:{PORT}"
    words = [
        sys.executable,
        __file__,
        rendezvous,
        str(load.messages),
        str(load.nbytes),
        str(wait_s),
    ]
    with _killed_at_exit() as started:
        for rank in range(RANKS):
            command = [*words, str(rank)]
            placed = command if lab is None else lab.command(HOSTS[rank], command)
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(placed, stdout=pipe, stderr=pipe, text=True))
        try:
            output, wrote = started[0].communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            return {"error": f"timed out after {END_S:g} s"}
        if started[0].returncode:
            return {"error": wrote.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(output)
    return found


@contextmanager
def _killed_at_exit() -> Iterator[list[subprocess.Popen[str]]]:
    """Yields a list. Processes that the caller adds to it are killed at the end of the `with`
    block.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


# ---- code that runs on each rank


def _resident_bytes(field: str) -> int:
    """Returns this process's resident memory in bytes: `VmRSS` is the current value, `VmHWM` the
    maximum.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"/proc/self/status has no {field}")


def _receive(comm: unisono.Communicator, load: Load) -> dict[str, int]:
    out, go = np.ones(load.nbytes // 8, np.int64), np.zeros(1, np.int64)
    wanted, differ = np.ones_like(out), np.ones(out.size, bool)
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the maximum VmHWM
    before = _resident_bytes("VmRSS")
    comm.recv(go, 1)
    waiting = _resident_bytes("VmHWM")
    wrong = 0
    for number in range(load.messages):
        comm.recv(out, 2, _TAG)
        # Every message begins with its number; some messages are compared completely.
        if number % max(1, load.messages // 48) == 0:
            wanted[:] = 1  # in place, since additional memory would distort the measurement
            np.cumsum(wanted, out=wanted)
            wanted += number * _STEP - 1
            wrong += int(np.count_nonzero(np.not_equal(out, wanted, out=differ)))
        else:
            wrong += int(out[0] != number * _STEP)
    peak = _resident_bytes("VmHWM")
    return {"waiting_bytes": waiting - before, "growth_bytes": peak - before, "wrong": wrong}


def _send(comm: unisono.Communicator, load: Load) -> None:
    messages = [load.message(number) for number in range(load.messages)]
    comm.barrier()
    for work in [comm.send(message, 0, _TAG, async_op=True) for message in messages]:
        work.wait()


def main() -> None:
    rendezvous, messages, nbytes, wait_s, number = sys.argv[1:]
    load, rank = Load(messages=int(messages), nbytes=int(nbytes)), int(number)
    with unisono.init(rank=rank, size=RANKS, rendezvous=rendezvous, timeout_s=END_S) as comm:
        if rank == 0:
            print(json.dumps(_receive(comm, load)))
        elif rank == 1:
            comm.barrier()
            sleep(float(wait_s))
            comm.send(np.ones(1, np.int64), 0)
        else:
            _send(comm, load)
        comm.barrier()


if __name__ == "__main__":
    main()
