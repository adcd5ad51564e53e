"""What a rank needs of the others of a failed group to agree with them: `RecoveryTransport`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unisono.bootstrap import GroupConfig, JoinedGroup
from unisono.errors import RendezvousError
from unisono.recovery import agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRequest:
    """A rank of the old group that asks for the new one.

    `name` is the old group's own; `exclude` holds its ranks that are to be left out.
    """

    name: str
    rank: int
    ranks: int
    exclude: frozenset[int]
    timeout_s: float
    staging_bytes: int
    word: bytes


class TooFewError(Exception):
    """So few ranks are within reach that others may go on without them."""


class RecoveryTransport(Protocol):
    """What still transport a rank to the others of a group that has failed. One thread uses it."""

    def send(self, to: int, data: bytes) -> None:
        """Sends at once or later, in order; returns at once."""

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """What has come, by whom; waits at most `timeout_s` for something."""

    def keep_up(self) -> frozenset[int]:
        """Sends what waits; says who is gone for certain. Called often."""

    def advance(self, expected: int, desired: int) -> int:
        """Moves the ledger if it is at `expected`; where it was. Raises `TooFewError` where that
        takes more ranks than can be reached."""

    def form(self, request: RecoveryRequest, ballot: int, members: tuple[int, ...]) -> JoinedGroup:
        """Forms the group of a ballot. Raises `RendezvousError` if that fails, also when a member
        is gone or the ledger has moved on."""

    def close(self, *, finished: bool) -> None:
        """The end of it; others need not wait for who has not `finished`."""


def recovered_group_config(
    transport: RecoveryTransport, request: RecoveryRequest, ballot: int, members: tuple[int, ...]
) -> GroupConfig:
    """How the members of a ballot's group meet: as those of any other, but they are watched."""

    def watch() -> None:
        lost = transport.keep_up() & frozenset(members)
        if lost:
            raise RendezvousError(f"lost while the group was being formed: {sorted(lost)}")
        if transport.advance(0, 0) != agreement.undecided(ballot):
            raise RendezvousError("another group is being formed")

    return GroupConfig(
        rank=members.index(request.rank),
        size=len(members),
        rendezvous=f"shrink-{request.name}-{ballot}",
        timeout_s=request.timeout_s,
        staging_bytes=request.staging_bytes,
        word=request.word,
        watch=watch,
    )
