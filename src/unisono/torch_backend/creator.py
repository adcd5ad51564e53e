"""Makes the process group when torch asks for one."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from unisono.communicator import init
from unisono.errors import UnsupportedError
from unisono.torch_backend import Options
from unisono.torch_backend.convert import seconds
from unisono.torch_backend.process_group import ProcessGroup


def create(options: Any, pg_options: Any) -> ProcessGroup:
    """The process group of this rank. All ranks of the group must call it.

    `options` is torch's: store, group_rank, group_size, timeout, group_id; `pg_options` is ours.
    """
    ours = Options() if pg_options is None else pg_options
    if not isinstance(ours, Options):
        raise UnsupportedError(
            f"unisono takes unisono.torch_backend.Options as pg_options, but got {pg_options!r}"
        )
    rank: int = options.group_rank
    timeout: timedelta = options.timeout
    rendezvous = _agree(options.store, rank, timeout)
    comm = init(
        rank=rank,
        size=options.group_size,
        rendezvous=rendezvous,
        timeout_s=seconds(timeout) or 300.0,
        reproducible=ours.reproducible,
    )
    return ProcessGroup(comm, options.store, list(options.global_ranks_in_group))


def _agree(store: Any, rank: int, timeout: timedelta) -> str:
    """A string that rank 0 drew and every rank of this group knows.

    A store can outlive a group and see a second one of the same name (destroy, then init again
    under torchrun); each rank counts its visits, so that none reads the earlier group's string.
    """
    visit = store.add(f"unisono/visits/{rank}", 1)
    key = f"unisono/rendezvous/{visit}"
    if rank == 0:
        store.set(key, secrets.token_hex(16))
    store.wait([key], timeout)
    agreed: bytes = store.get(key)
    return agreed.decode()
