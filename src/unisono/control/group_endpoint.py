"""What the links need of those above: the native end of a group, and where the ranks are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from unisono.native import TlsSession
from unisono.transport import Address

FAILED_EVENT = 1
ANXIOUS_EVENT = 2


class Fault(IntEnum):
    """What can be the failure of a group: faults of `csrc/core/error.h`."""

    PEER_LOST = 1
    TIMEOUT = 2
    MISMATCH = 3
    ABORTED = 4
    SYSTEM = 6
    INVALID = 7


def fault_of(number: int) -> Fault:
    """The fault that a peer tells by its number. One that is not known here is `SYSTEM`, as the
    core takes it: the group has failed for the peer, and the text says why.

    >>> fault_of(1), fault_of(99)
    (<Fault.PEER_LOST: 1>, <Fault.SYSTEM: 6>)
    """
    return Fault(number) if number in list(Fault) else Fault.SYSTEM


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """Where a rank is: the number of its host, and an address for each of its rails."""

    rank: int
    host: int
    addresses: tuple[Address, ...]


class GroupEndpoint(Protocol):
    """This rank's end of a group. Called by the links' thread only; ranks are the group's."""

    def attach(
        self, peer: int, kind: int, stream: int, streams: int, fd: int, tls: TlsSession | None
    ) -> None:
        """Takes a proved, non-blocking connection, and owns descriptor and session from here."""

    def abandon(self) -> None:
        """In a forked child: closes its copies of the connections."""

    def peer_left(self, peer: int) -> None:
        """A peer closed the group in good order."""

    def fail(self, fault: int, text: str) -> None:
        """Records a failure, unless there is one already, and wakes everybody of this host."""

    def failure(self) -> tuple[int, str] | None:
        """The failure that is recorded."""

    def called(self) -> bytes:
        """What this rank is doing: 48 bytes that mean something to its peers only."""

    def heard(self, peer: int, called: bytes) -> None:
        """What a peer called last."""

    def exchange_successor(self, expected: int, desired: int) -> int:
        """Moves the word that this host's ranks share, its vote on what succeeds the group."""

    def events_fd(self) -> int:
        """A descriptor that is readable when `take_events` has something to say."""

    def take_events(self) -> int:
        """Bits, each told once: `FAILED_EVENT`, the group failed here; `ANXIOUS_EVENT`, somebody
        here waits for other hosts for a while already."""
