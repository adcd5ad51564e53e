"""A rank's world: the locations of all ranks, and the means to dial them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unisono.rank_connections.control_messages import ControlMessage
from unisono.rank_connections.group_endpoint import PeerInfo
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
    """Parameters with which a rank joins the world. `sources` are its own addresses, one per
    rail."""

    world: bytes
    rank: int
    peer_infos: tuple[PeerInfo, ...]
    sources: tuple[str, ...]
    secret: bytes
    security: Security
    streams: int
    peer_timeout_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """State that all groups of a rank share. `send` sends a message about a group to other
    ranks."""

    loop: EventLoop
    config: WorldConfig
    send: Callable[[ControlMessage], None]

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
        """Dials a rank of the world over a rail.

        The rank's host may take `host_s` seconds to answer. Its process may take `process_s`
        seconds; the default is the world's join timeout.
        """
        config = self.config
        request = DialRequest(
            rank=to,
            address=config.peer_infos[to].addresses[rail],
            # With one rail, the kernel chooses the source address. With several rails, each
            # connection uses the address of its rail.
            source=None if self.rails(to) == 1 else config.sources[rail],
            secret=config.secret,
            purpose=purpose_of(config.world, to),
            security=config.security,
            introduction=introduction,
            host_s=host_s,
            process_s=config.timeout_s if process_s is None else process_s,
        )
        return Dial(self.loop, request, opened=opened, failed=failed)

    def rails(self, to: int) -> int:
        """Returns the number of rails to a rank."""
        return min(len(self.config.sources), len(self.config.peer_infos[to].addresses))

    def is_remote(self, rank: int) -> bool:
        """Returns True if a rank is on another host."""
        peer_infos = self.config.peer_infos
        return peer_infos[rank].host != peer_infos[self.config.rank].host
