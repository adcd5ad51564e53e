"""Counters of a communicator for each operation: calls, bytes, and seconds of waiting.

`stats` is a method of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.communicator.call_volume import COUNTER_ROWS

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStats:
    """Counts of one operation on one rank. `+` and `-` work field by field."""

    calls: int = 0
    """Calls that ended without an error."""
    bytes_sent: int = 0
    """Bytes from this rank to others, by the operation's formula in `CommunicatorStats`."""
    bytes_received: int = 0
    """Bytes from others to this rank, by the operation's formula in `CommunicatorStats`."""
    wait_s: float = 0.0
    """Seconds that calls waited for other ranks; see `CommunicatorStats`."""

    def __add__(self, other: OperationStats) -> OperationStats:
        return self._combined(other, 1)

    def __sub__(self, other: OperationStats) -> OperationStats:
        return self._combined(other, -1)

    def _combined(self, other: OperationStats, sign: int) -> OperationStats:
        return OperationStats(
            calls=self.calls + sign * other.calls,
            bytes_sent=self.bytes_sent + sign * other.bytes_sent,
            bytes_received=self.bytes_received + sign * other.bytes_received,
            wait_s=self.wait_s + sign * other.wait_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorStats:
    """Counts of this rank on one communicator. Other communicators have counts of their own.

    `stats - earlier` are the counts since `earlier`. `stats + other` adds two communicators.

    **Calls.** A call counts once it has ended without an error, whether it blocked or not. A
    v-collective counts as its collective: all_gather_v as all_gather. Arrays that the library packs
    into one message (in a batch, in a `Controller`) count as one call each.

    **Bytes** follow from the formulas below, in the caller's element type. So they do not depend on
    the algorithm, the transport or the hosts, and the sum of `bytes_sent` over all ranks equals the
    sum of `bytes_received`; only puts and gets count on one side. With n ranks, N elements in the
    larger buffer, and s elements in this rank's share (its piece of `out` of a reduce_scatter, its
    `x` of an all_gather):

    | operation | sent | received |
    |---|---|---|
    | all_reduce | N - s + (n-1) s | the same |
    | reduce_scatter | N - s | (n-1) s |
    | all_gather | (n-1) s | N - s |
    | all_to_all | elements for others | elements from others |
    | broadcast | root: (n-1) N | others: N |
    | reduce | others: N | root: (n-1) N |
    | scatter | root: N - s | others: s |
    | gather | others: s | root: N - s |
    | scan, exscan | N, but the last rank 0 | N, but rank 0 0 |
    | barrier | 0 | 0 |
    | send, recv | the message, unless it goes to this rank | the same |
    | put | `x`, unless it goes to this rank | 0 |
    | get | 0 | `out`, unless it comes from this rank |
    | signal, wait | 0 | 0 |

    The shares of an all_reduce are N // n elements, and one more on the first N mod n ranks. With
    equal shares, all_reduce moves 2 (n-1)/n N both ways; reduce_scatter, all_gather and all_to_all
    (n-1)/n N.

    **Seconds** count the time in which calls of this rank waited for other ranks, in any thread.
    They include the delay of a late rank and the time of the transfer itself. They exclude the
    first microseconds of each wait, in which the rank polls, since reading the clock would cost as
    much. Probes count as recv. Simultaneous waits of several threads add up.
    """

    operations: Mapping[str, OperationStats]
    """Counts by operation, for every operation: "all_reduce", "reduce_scatter", "all_gather",
    "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier", "scan", "exscan", "send",
    "recv", "put", "get", "signal", "wait"."""
    internal: OperationStats
    """Collectives that the library makes for itself: exchanges of lengths before v-collectives,
    votes before the collectives of a `Controller`, exchanges in `split` and `window`, and
    comparisons of calls that reduce by a Python function.
    """

    @property
    def calls(self) -> int:
        """Calls of all operations."""
        return sum(each.calls for each in self.operations.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by all operations, excluding `internal`."""
        return sum(each.bytes_sent for each in self.operations.values())

    @property
    def bytes_received(self) -> int:
        """Bytes received by all operations, excluding `internal`."""
        return sum(each.bytes_received for each in self.operations.values())

    @property
    def wait_s(self) -> float:
        """Seconds waited for other ranks in all operations, including `internal`."""
        return sum((each.wait_s for each in self.operations.values()), self.internal.wait_s)

    def __add__(self, other: CommunicatorStats) -> CommunicatorStats:
        return CommunicatorStats(
            operations={
                name: own + other.operations[name] for name, own in self.operations.items()
            },
            internal=self.internal + other.internal,
        )

    def __sub__(self, other: CommunicatorStats) -> CommunicatorStats:
        return CommunicatorStats(
            operations={
                name: own - other.operations[name] for name, own in self.operations.items()
            },
            internal=self.internal - other.internal,
        )


def stats(self: Communicator) -> CommunicatorStats:
    """Returns the counts of this rank on this communicator so far.

    Counting is always on. Any thread may call this at any time, also after `close`. Counts of calls
    that run meanwhile in other threads may be missing in some fields.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of stats") as comm:
    ...     before = comm.stats()
    ...     x = comm.all_reduce(np.ones(1000))
    ...     step = comm.stats() - before
    >>> step.operations["all_reduce"].calls, step.bytes_sent  # with one rank, nothing moves
    (1, 0)
    """
    rows = {
        name: OperationStats(
            calls=calls, bytes_sent=sent, bytes_received=received, wait_s=waited_ns * 1e-9
        )
        for name, (calls, sent, received, waited_ns) in zip(
            COUNTER_ROWS, self._group.counters(), strict=True
        )
    }
    internal = rows.pop(_INTERNAL)
    return CommunicatorStats(operations=rows, internal=internal)


def bytes_sent(comm: Communicator) -> int:
    """Returns `comm.stats().bytes_sent`, but takes a tenth of the time."""
    rows = zip(COUNTER_ROWS, comm._group.counters(), strict=True)
    return sum(sent for name, (_, sent, _, _) in rows if name != _INTERNAL)
