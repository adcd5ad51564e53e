"""Bootstrap through the store that torchrun gives its ranks, for programs that call `unisono.init`.

This module imports torch, because the store's protocol is torch's own. It does so only when a rank
that torchrun started has to find ranks of other hosts. Torch's rendezvous opens the store. So this
module uses the store of torchrun's agents if the agents share one. Otherwise torch finds the same
store again when the program makes its process groups.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from unisono.bootstrap.key_value_store import KeyValueBootstrap, Store
from unisono.errors import RendezvousError


def store_of_torch(rendezvous: str, secret: bytes | None) -> KeyValueBootstrap:
    """Returns a bootstrap store over the store that torch's environment variables specify.

    `rendezvous` separates jobs; `KeyValueBootstrap` separates the attempts of one job.
    """
    name = f"unisono/{hashlib.sha256(rendezvous.encode()).hexdigest()[:16]}"
    return KeyValueBootstrap(_open, name, secret)


def _open(timeout_s: float) -> Store:
    """Opens torch's store. Raises `RendezvousError` without torch, `RuntimeError` without a
    store."""
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise RendezvousError(
            "torchrun started these ranks on several hosts, but torch, which finds the other "
            "ranks, cannot be imported: set UNISONO_RENDEZVOUS=tcp://HOST:PORT with rank 0's host"
        ) from error
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is not set
        raise RendezvousError(str(error)) from error
    found: Store = store
    return found
