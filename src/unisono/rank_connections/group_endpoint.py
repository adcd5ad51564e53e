"""Types that the connection manager shares with its users: faults, locations of ranks, and the
interface of the native group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from unisono.native import TlsSession
from unisono.transport import Address

FAILED_EVENT = 1
OVERDUE_EVENT = 2


class Fault(IntEnum):
    """Causes of a group's failure; the faults of `csrc/core/error.h`."""

    PEER_LOST = 1
    TIMEOUT = 2
    MISMATCH = 3
    ABORTED = 4
    SYSTEM = 6
    INVALID = 7


def fault_of(number: int) -> Fault:
    """Converts a number that a peer has sent to a fault.

    An unknown number is `SYSTEM`, as in the core: the peer's group has failed, and the text gives
    the reason.

    >>> fault_of(1), fault_of(99)
    (<Fault.PEER_LOST: 1>, <Fault.SYSTEM: 6>)
    """
    return Fault(number) if number in list(Fault) else Fault.SYSTEM


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """Location of a rank: the number of its host, and an address for each of its rails (network
    interfaces).
    """

    rank: int
    host: int
    addresses: tuple[Address, ...]


class GroupEndpoint(Protocol):
    """This rank's native group. Only the connection manager's thread calls the methods. Ranks are
    ranks of the group."""

    def attach(
        self, peer: int, kind: int, stream: int, streams: int, fd: int, tls: TlsSession | None
    ) -> None:
        """Attaches an authenticated, non-blocking connection. The group then owns descriptor and
        session."""

    def abandon(self) -> None:
        """Closes a forked child's copies of the connections."""

    def peer_left(self, peer: int) -> None:
        """Records that a peer closed the group without a failure."""

    def fail(self, fault: int, text: str) -> None:
        """Records a failure, unless a failure is already recorded, and wakes all waiting ranks of
        this host.
        """

    def failure(self) -> tuple[int, str] | None:
        """Returns the recorded failure."""

    def called(self) -> bytes:
        """Returns this rank's most recent call, as 48 bytes that only the native groups of its
        peers interpret.
        """

    def record_last_call(self, peer: int, called: bytes) -> None:
        """Records a peer's most recent call."""

    def exchange_successor(self, expected: int, desired: int) -> int:
        """Sets the host's vote on the group that replaces a failed group to `desired` if it equals
        `expected`. Returns the previous value. The vote is a word that the host's ranks share.
        """

    def events_fd(self) -> int:
        """Returns a descriptor that is readable when `take_events` has an event."""

    def take_events(self) -> int:
        """Returns the events since the previous call, as bits.

        `FAILED_EVENT`: the group failed here. `OVERDUE_EVENT`: a rank here has waited for other
        hosts for a while.
        """
