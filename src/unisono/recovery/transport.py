"""`RecoveryTransport`: communication among the ranks of a failed group, for the agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unisono.bootstrap import GroupConfig, JoinedGroup
from unisono.errors import RendezvousError
from unisono.recovery import membership_agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRequest:
    """One rank's parameters for forming the group that replaces a failed group.

    `name` identifies the old group; `exclude` holds its ranks to exclude.
    """

    name: str
    rank: int
    ranks: int
    exclude: frozenset[int]
    timeout_s: float
    staging_bytes: int
    rank0_data: bytes


class TooFewError(Exception):
    """Raised if so few ranks are reachable that the unreachable ranks may form a group without
    them.
    """


class RecoveryTransport(Protocol):
    """Connects a rank to the other ranks of a failed group. One thread uses it."""

    def send(self, to: int, data: bytes) -> None:
        """Sends a message to rank `to`, now or later, and returns at once. Messages stay in
        order.
        """

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Returns the messages that have arrived, with their sources. Waits at most `timeout_s` for
        a message."""

    def progress(self) -> frozenset[int]:
        """Sends waiting messages. Returns ranks that are dead, have left or are unreachable. Called
        often.
        """

    def advance(self, expected: int, desired: int) -> int:
        """Sets the ledger, the word that records the decision, to `desired` if it equals
        `expected`; returns the previous value.

        Raises `TooFewError` if too few ranks are reachable to change the ledger.
        """

    def form(self, request: RecoveryRequest, ballot: int, members: tuple[int, ...]) -> JoinedGroup:
        """Forms the group of a ballot (a numbered attempt). Raises `RendezvousError` if that fails,
        for example if a member was lost or the ledger has changed."""

    def close(self, *, finished: bool) -> None:
        """Ends the attempt. Unless the attempt `finished`, the other ranks stop waiting for this
        rank.
        """


def recovered_group_config(
    transport: RecoveryTransport, request: RecoveryRequest, ballot: int, members: tuple[int, ...]
) -> GroupConfig:
    """Returns the configuration of a ballot's group. Its `watch` raises an error if a member is
    lost or the ledger has changed.
    """

    def watch() -> None:
        lost = transport.progress() & frozenset(members)
        if lost:
            raise RendezvousError(
                f"ranks {sorted(lost)} were lost while the group was being formed"
            )
        if transport.advance(0, 0) != membership_agreement.undecided(ballot):
            raise RendezvousError("another group is being formed")

    return GroupConfig(
        rank=members.index(request.rank),
        size=len(members),
        rendezvous=f"shrink-{request.name}-{ballot}",
        timeout_s=request.timeout_s,
        staging_bytes=request.staging_bytes,
        rank0_data=request.rank0_data,
        watch=watch,
    )
