"""The store that torchrun gives its ranks, for programs that call `unisono.init` themselves.

The one module below the backend that imports torch, and only when a rank that torchrun started
needs it to find ranks of other hosts: only torch speaks the protocol of its store. Torch's own
rendezvous opens it, so it is the agents' store where they share theirs, else one that torch, too,
will find when the program makes its process groups.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from unisono.bootstrap.key_value_store import KeyValueBootstrap, Store
from unisono.errors import RendezvousError


def store_of_torch(rendezvous: str, secret: bytes | None) -> KeyValueBootstrap:
    """The board at the store that torch's environment variables lead to.

    `rendezvous` keeps jobs apart; `KeyValueBootstrap` itself the attempts of one.
    """
    name = f"unisono/{hashlib.sha256(rendezvous.encode()).hexdigest()[:16]}"
    return KeyValueBootstrap(_open, name, secret)


def _open(timeout_s: float) -> Store:
    """Raises `RendezvousError` without torch, `RuntimeError` if there is no store."""
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise RendezvousError(
            "these ranks of several hosts were started by torchrun, but torch cannot be imported "
            "to find the others: set UNISONO_RENDEZVOUS=tcp://HOST:PORT with rank 0's host"
        ) from error
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is not set
        raise RendezvousError(str(error)) from error
    found: Store = store
    return found
