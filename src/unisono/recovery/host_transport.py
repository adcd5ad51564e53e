"""Recovery transport for a failed group on one host."""

from __future__ import annotations

from unisono import native
from unisono.bootstrap import JoinedGroup, join_segment
from unisono.recovery.host_messages import HostMessages
from unisono.recovery.transport import RecoveryRequest, recovered_group_config


class HostTransport:
    """The transport: datagrams, and the old group's memory."""

    def __init__(self, group: native.Group, request: RecoveryRequest) -> None:
        self._group = group
        self._others = [r for r in range(request.ranks) if r != request.rank]
        self._messages = HostMessages(request.name, request.rank, request.ranks)
        self.send = self._messages.send
        self.receive = self._messages.receive

    def progress(self) -> frozenset[int]:
        """Sends waiting messages; returns dead ranks, according to the kernel."""
        gone = frozenset(rank for rank in self._others if not self._group.present(rank))
        self._messages.drop(gone)
        self._messages.flush()
        return gone

    def advance(self, expected: int, desired: int) -> int:
        """Compares and exchanges the ledger's word in the old group's memory."""
        return self._group.exchange_successor(expected, desired)

    def form(self, request: RecoveryRequest, ballot: int, members: tuple[int, ...]) -> JoinedGroup:
        return join_segment(recovered_group_config(self, request, ballot, members))

    def close(self, *, finished: bool) -> None:
        """Closes the socket. A rank that has not finished leaves the group, which all ranks
        detect."""
        self._messages.close()
