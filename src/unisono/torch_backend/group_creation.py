"""Creation of a process group for torch."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from torch import distributed as dist

from unisono import config
from unisono.bootstrap import KeyValueBootstrap, this_host
from unisono.communicator import Communicator, join
from unisono.errors import UnsupportedError
from unisono.torch_backend import Options
from unisono.torch_backend.convert import seconds
from unisono.torch_backend.mixed import group_over
from unisono.torch_backend.other_devices import OtherBackends, other_backends_of, serves_cuda
from unisono.torch_backend.own_cuda import OwnCuda, own_cuda
from unisono.torch_backend.private import group_being_made
from unisono.torch_backend.process_group import ProcessGroup
from unisono.transport import job_secret

_TOKEN_BYTES = 16


def create(options: Any, pg_options: Any) -> ProcessGroup:
    """Creates the process group of this rank. All ranks of the group must call this.

    `options` is torch's object: store, group_rank, group_size, timeout, group_id. `pg_options` is
    an `Options`.
    """
    making = group_being_made()
    others: OtherBackends | OwnCuda | None = other_backends_of(making)
    ours = pg_options
    if pg_options is None or (others and not isinstance(pg_options, Options)):
        ours = Options()  # torch passes one object to all backends; it may be for another backend
    if not isinstance(ours, Options):
        raise UnsupportedError(
            f"pg_options: expected unisono.torch_backend.Options, not {pg_options!r}"
        )
    ranks = list(options.global_ranks_in_group)
    settings = config.override(
        config.settings(),
        timeout_s=seconds(options.timeout) or 300.0,
        reproducible=ours.reproducible,
    )
    comm = _from_default_group(ranks, settings) or _join_by_store(options, settings)
    comm.timeout_s = settings.timeout_s
    if others is None and serves_cuda(making):
        others = own_cuda(comm, options.store, ranks)
    return group_over(comm, options.store, ranks, others)


def _from_default_group(ranks: list[int], settings: config.Settings) -> Communicator | None:
    """Makes a communicator that shares the default group's connections. Returns None unless the
    default group spans several hosts and has the same value of `reproducible`.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, ProcessGroup):
        return None
    comm: Communicator = world.communicator
    if len(comm.hosts) == 1 or comm.reproducible != settings.reproducible or not ranks:
        return None
    return comm.group(ranks)


def _join_by_store(options: Any, settings: config.Settings) -> Communicator:
    """Makes a communicator for ranks that share only torch's store."""
    rank, size, store = options.group_rank, options.group_size, options.store
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
