"""Creation of a process group for torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed as dist

from unisono import config
from unisono.communicator import Communicator, join_by_store
from unisono.errors import UnsupportedError
from unisono.torch_backend import Options
from unisono.torch_backend.convert import seconds
from unisono.torch_backend.mixed import group_over
from unisono.torch_backend.other_devices import OtherBackends, other_backends_of, serves_cuda
from unisono.torch_backend.own_cuda import OwnCuda, own_cuda
from unisono.torch_backend.private import group_being_made
from unisono.torch_backend.process_group import ProcessGroup


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
    comm = _from_default_group(ranks, settings) or join_by_store(
        options.store, options.group_rank, options.group_size, settings
    )
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


def group_on_store(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Makes a process group that torch does not know, from a store, a rank and a size.

    All ranks of the group must call this with stores of the same keys. Give each group a prefix
    that no other group of the store has: `dist.PrefixStore("quorum 7", store)`. `timeout` is the
    limit of the call and of the group's collectives. The group is used by its methods, such as
    `group.allreduce([tensor]).wait()`. If a rank dies, the calls of the others raise
    `PeerLostError`. The others then `abort` the group and make one of another size.

    Raises `RendezvousError` if the ranks do not find each other within `timeout`, `ValueError` for
    a rank or timeout out of range.

    >>> from torch import distributed as dist
    >>> import torch
    >>> store = dist.HashStore()
    >>> group = group_on_store(store, 0, 1, timedelta(seconds=30))
    >>> total = torch.ones(2)
    >>> group.allreduce([total]).wait()
    True
    >>> group.shutdown()
    """
    limit_s = seconds(timeout)
    if limit_s is None:
        raise ValueError(f"timeout: expected a positive time, not {timeout}")
    settings = config.override(config.settings(), timeout_s=limit_s)
    return ProcessGroup(join_by_store(store, rank, size, settings), store)
