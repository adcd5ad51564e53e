"""Compares the clocks of hosts by messages, and uses the round trip that took the least time.

Ranks on one kernel share the kernel's monotonic clock. On each other kernel, one rank asks rank 0
for the time of rank 0's clock. Rank 0 answers at some time of the round trip, so the error is at
most half of the round trip (Cristian, Probabilistic clock synchronization, 1989). Afterwards the
clocks may drift apart.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

DRIFT: Final = 1e-4
"""Maximum drift between two clocks, in seconds per second: 50 ppm for each clock, as in common
quartz oscillators."""
_ROUND_TRIPS: Final = 16
_TAG: Final = 911


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """One comparison of a rank's clock with the clock named `reference`.

    When the rank's clock showed `at_ns`, the other clock showed `at_ns + offset_ns`, within
    `error_ns`.
    """

    at_ns: int
    offset_ns: int
    error_ns: int
    reference: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as data for JSON."""
        return asdict(self)


class ClockCommunicator(Protocol):
    """The methods of a communicator that a comparison of clocks uses."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""

    def send(self, x: Any, dst: int, tag: int = 0) -> Any:
        """Sends the array `x` to rank `dst`."""

    def recv(self, x: Any, src: int, tag: int = 0) -> Any:
        """Receives a message from rank `src` into the array `x`."""


def clock_identity() -> str:
    """Returns a text that is equal for processes with the same monotonic clock. The text has the
    ids of the kernel's boot and of the time namespace.

    >>> clock_identity() == clock_identity()
    True
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return uuid.uuid4().hex  # unique, because it is unknown which processes share a clock
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # a kernel without time namespaces
        return boot


def compare_clocks(
    comm: ClockCommunicator, now_ns: Callable[[], int], clock: str
) -> ClockReading | None:
    """Compares this rank's clock with rank 0's clock. On each host except that of rank 0, only the
    first rank compares its clock; all other ranks return None.

    `clock` is the name of this rank's clock. All ranks must call this function. Raises the errors
    of `send` and `recv`. Takes 16 round trips for each host except that of rank 0.

    >>> import time, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of clocks") as comm:
    ...     compare_clocks(comm, time.monotonic_ns, clock_identity()) is None
    True
    """
    asking = [host[0] for host in comm.hosts if 0 not in host]
    if comm.rank == 0:
        for rank in asking:
            _answer(comm, rank, now_ns, clock)
    elif comm.rank in asking:
        return _ask(comm, now_ns)
    return None


def _answer(comm: ClockCommunicator, rank: int, now_ns: Callable[[], int], clock: str) -> None:
    name = np.zeros(128, np.uint8)
    text = clock.encode()[: len(name)]
    name[: len(text)] = np.frombuffer(text, np.uint8)
    comm.send(name, rank, tag=_TAG)
    question = np.zeros(1, np.int64)
    for _ in range(_ROUND_TRIPS):
        comm.recv(question, rank, tag=_TAG)
        comm.send(np.array([now_ns()], np.int64), rank, tag=_TAG)


def _ask(comm: ClockCommunicator, now_ns: Callable[[], int]) -> ClockReading:
    name, answer = np.zeros(128, np.uint8), np.zeros(1, np.int64)
    comm.recv(name, 0, tag=_TAG)
    reference = name.tobytes().rstrip(b"\0").decode(errors="replace")
    found: list[ClockReading] = []
    for _ in range(_ROUND_TRIPS):
        asked_ns = now_ns()
        comm.send(np.zeros(1, np.int64), 0, tag=_TAG)
        comm.recv(answer, 0, tag=_TAG)
        answered_ns = now_ns()
        middle_ns = (asked_ns + answered_ns) // 2
        found.append(
            ClockReading(
                at_ns=middle_ns,
                offset_ns=int(answer[0]) - middle_ns,
                error_ns=(answered_ns - asked_ns + 1) // 2,
                reference=reference,
            )
        )
    return min(found, key=lambda reading: reading.error_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockAlignment:
    """Translation of a rank's times to the common clock. `measured` is true if round trips measured
    the offset, or if the rank has the common clock. Otherwise the offset is from the hosts'
    calendar clocks, and its error is unknown.
    """

    readings: tuple[ClockReading, ...]
    measured: bool = True

    def to_common_ns(self, time_ns: int) -> int:
        """Translates a time of the rank's clock to a time of the common clock, in ns.

        Between the first and the last comparison, the offset is interpolated.

        >>> ten_s = ClockReading(at_ns=0, offset_ns=10**10, error_ns=5, reference="a")
        >>> ClockAlignment(readings=(ten_s,)).to_common_ns(7)
        10000000007
        """
        if not self.readings:
            return time_ns
        first, last = self.readings[0], self.readings[-1]
        if last.at_ns <= first.at_ns:
            return time_ns + last.offset_ns
        share = min(max((time_ns - first.at_ns) / (last.at_ns - first.at_ns), 0.0), 1.0)
        return time_ns + first.offset_ns + round(share * (last.offset_ns - first.offset_ns))

    def error_ns(self, time_ns: int) -> int:
        """Returns the largest error of a translated time in ns: the error of the comparisons, plus
        the drift since the nearest comparison.
        """
        if not self.readings:
            return 0
        distance_ns = min(abs(time_ns - reading.at_ns) for reading in self.readings)
        worst_ns = max(reading.error_ns for reading in self.readings)
        return worst_ns + round(DRIFT * distance_ns)
