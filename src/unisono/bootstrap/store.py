"""Bootstrap stores, by which every rank gets a text of every other rank before the ranks can
communicate."""

from __future__ import annotations

from typing import Protocol

from unisono.bootstrap.tcp_store import TcpStore
from unisono.config import TCP, TORCH_STORE
from unisono.transport import CLEAR, Security


class BootstrapStore(Protocol):
    """A service that exchanges texts among ranks that know nothing of each other. A rank uses a
    store once, in one thread.
    """

    @property
    def secret(self) -> bytes | None:
        """Secret that a rank must prove to know before it reads or writes texts. None: no proof is
        needed."""

    def exchange(self, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """Returns the texts of all ranks, by rank, when all ranks have contributed.

        Raises `RendezvousError` if a rank is missing after `timeout_s`, or if ranks disagree about
        rank or size. Raises `AuthenticationError` if this rank is rejected.
        """


def store_of(
    rendezvous: str, secret: bytes | None, security: Security = CLEAR
) -> BootstrapStore | None:
    """Returns the store that a rendezvous denotes. None: all ranks are on this host.

    Raises `ValueError` for an invalid address.

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
