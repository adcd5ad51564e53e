"""A group of ranks that share only a key-value store, such as torch's or Ray's."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from unisono import config
from unisono.bootstrap import KeyValueBootstrap, this_host
from unisono.communicator.communicator import Communicator
from unisono.communicator.initialization import join
from unisono.transport import job_secret

_TOKEN_BYTES = 16


def join_by_store(store: Any, rank: int, size: int, settings: config.Settings) -> Communicator:
    """Joins a group whose ranks find each other through a store of `bootstrap.Store`'s methods.

    Groups that use one store must do so one after the other, or under different prefixes. Raises
    the errors of `init`.
    """
    rendezvous, on_one_host = exchange_hosts(store, rank, size, settings)
    world = config.LaunchedRank(rank=rank, size=size, rendezvous=rendezvous)
    if on_one_host:
        return join(world, settings)
    bootstrap_store = KeyValueBootstrap(
        lambda _: store, f"unisono/{rendezvous}", job_secret(settings)
    )
    return join(world, settings, bootstrap_store=bootstrap_store)


def exchange_hosts(store: Any, rank: int, size: int, settings: config.Settings) -> tuple[str, bool]:
    """Exchanges host identities through the store.

    Returns a random text of rank 0, and True if all ranks are on hosts with equal identities.
    """
    host = this_host(settings.host_id)
    mine = secrets.token_bytes(_TOKEN_BYTES) + hashlib.sha256(repr(host).encode()).digest()
    bootstrap_store = KeyValueBootstrap(lambda _: store, "unisono/ranks")
    texts = bootstrap_store.exchange(rank, size, mine, settings.timeout_s)
    return texts[0][:_TOKEN_BYTES].hex(), len({text[_TOKEN_BYTES:] for text in texts}) == 1
