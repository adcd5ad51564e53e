"""Recovery transport for a failed group on one host."""

from __future__ import annotations

from unisono import native
from unisono.bootstrap import JoinedGroup, join_segment
from unisono.recovery.host_messages import HostMessages
from unisono.recovery.transport import RecoveryRequest, recovered_group_config


class HostTransport:
    """A `RecoveryTransport` on one host: datagrams between the ranks, and the ledger (the word that
    records the decision) in the failed group's memory.
    """

    def __init__(self, group: native.Group, request: RecoveryRequest) -> None:
        self._group = group
        self._others = [r for r in range(request.ranks) if r != request.rank]
        self._messages = HostMessages(request.name, request.rank, request.ranks)
        self.send = self._messages.send
        self.receive = self._messages.receive

    def progress(self) -> frozenset[int]:
        """Sends waiting messages. Returns ranks that are dead according to the kernel."""
        gone = frozenset(rank for rank in self._others if not self._group.present(rank))
        self._messages.drop(gone)
        self._messages.flush()
        return gone

    def advance(self, expected: int, desired: int) -> int:
        """Sets the ledger, the word that records the decision, to `desired` if it equals
        `expected`; returns the previous value.
        """
        return self._group.exchange_successor(expected, desired)

    def form(self, request: RecoveryRequest, ballot: int, members: tuple[int, ...]) -> JoinedGroup:
        return join_segment(recovered_group_config(self, request, ballot, members))

    def close(self, *, finished: bool) -> None:
        """Closes the socket. Sends nothing if the attempt has not finished: this rank then leaves
        the group, which the other ranks detect."""
        self._messages.close()
