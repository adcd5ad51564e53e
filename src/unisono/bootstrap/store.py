"""How every rank of a job learns a text of every other, before any of them can communicate."""

from __future__ import annotations

from typing import Protocol

from unisono.bootstrap.tcp_store import TcpStore
from unisono.config import TCP, TORCH_STORE
from unisono.transport import CLEAR, Security


class BootstrapStore(Protocol):
    """Where ranks that know nothing of each other leave their texts; used once, by one thread."""

    @property
    def secret(self) -> bytes | None:
        """What a rank must prove to know to read or write here; None: nothing."""

    def exchange(self, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """The texts of all ranks, in their order; returns when all have left theirs.

        Raises `RendezvousError` if a rank is missing after `timeout_s`, or they disagree about
        who they are; `AuthenticationError` if this rank is not let in.
        """


def store_of(
    rendezvous: str, secret: bytes | None, security: Security = CLEAR
) -> BootstrapStore | None:
    """The board that a rendezvous means; None if it means that all ranks are on this host.

    Raises `ValueError` for a meeting point that cannot be.

    >>> store_of("a text of this job", None) is None
    True
    >>> store_of("tcp://192.0.2.1:29400", b"secret").secret
    b'secret'
    """
    if rendezvous.startswith(TCP):
        return TcpStore(rendezvous, secret, security)
    if rendezvous.startswith(TORCH_STORE):
        from unisono.bootstrap.torch_store import store_of_torch

        return store_of_torch(rendezvous, secret)
    return None
