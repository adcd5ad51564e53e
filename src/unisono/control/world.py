"""A rank's place in its world: who and where all are, and how it dials them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unisono.control.group_endpoint import PeerInfo
from unisono.control.messages import ControlMessage
from unisono.transport import (
    Connection,
    Dial,
    DialFailure,
    DialRequest,
    EventLoop,
    Introduction,
    Security,
    purpose_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """On what terms a rank joins: `sources` are its own addresses, one a rail."""

    world: bytes
    rank: int
    contacts: tuple[PeerInfo, ...]
    sources: tuple[str, ...]
    secret: bytes
    security: Security
    streams: int
    peer_timeout_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What all groups of a rank share. `tell` brings a message of a group to other ranks."""

    loop: EventLoop
    terms: WorldConfig
    tell: Callable[[ControlMessage], None]

    def dial(
        self,
        to: int,
        rail: int,
        introduction: Introduction,
        *,
        host_s: float,
        process_s: float | None = None,
        opened: Callable[[Connection], None],
        failed: Callable[[DialFailure], None],
    ) -> Dial:
        """Dials a rank of the world over a rail; its host may take `host_s` to answer, its process
        `process_s`, by default as long as all had to join."""
        terms = self.terms
        wanted = DialRequest(
            rank=to,
            address=terms.contacts[to].addresses[rail],
            # With one rail the kernel knows best; with several, each connection keeps to its own.
            source=None if self.rails(to) == 1 else terms.sources[rail],
            secret=terms.secret,
            purpose=purpose_of(terms.world, to),
            security=terms.security,
            introduction=introduction,
            host_s=host_s,
            process_s=terms.timeout_s if process_s is None else process_s,
        )
        return Dial(self.loop, wanted, opened=opened, failed=failed)

    def rails(self, to: int) -> int:
        """How many rails lead to a rank."""
        return min(len(self.terms.sources), len(self.terms.contacts[to].addresses))

    def is_remote(self, rank: int) -> bool:
        """Whether a rank is on another host."""
        contacts = self.terms.contacts
        return contacts[rank].host != contacts[self.terms.rank].host
