"""Joining the job's group of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import config, native
from unisono.bootstrap import GroupConfig, join_group
from unisono.communicator.arguments import check_timeout, whole
from unisono.communicator.communicator import Communicator
from unisono.communicator.own_selection import own_table
from unisono.selection import Selectable

if TYPE_CHECKING:
    from unisono.bootstrap import BootstrapStore


def init(
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | None = None,
    timeout_s: float | None = None,
    reproducible: bool | None = None,
    *,
    selection: Selectable | None = None,
) -> Communicator:
    """Joins the job's group of all ranks.

    Without arguments rank, size and rendezvous are those of `unisono.run`, torchrun, mpiexec or
    srun. `rendezvous` is any text equal on all ranks and the job's own, if they are on one host;
    else `tcp://host:port`, where rank 0 listens on its host. `timeout_s` (default 300)
    holds for joining and for each call. `reproducible` (default: `UNISONO_REPRODUCIBLE`, else
    False) makes the bits of every reduction independent of message size, algorithm and hosts; it
    must be the same on all ranks, and `split` and `group` pass it on. `selection` (a
    `communicator.Selection` or a file) says which algorithm serves which call, before the
    environment and what is built in; rank 0's is what the whole group uses.

    Raises `RendezvousError` if the ranks do not find each other, `AuthenticationError` if this one
    has another job secret, `UnsupportedError` for a wrong selection.

    >>> with init(rank=0, size=1, rendezvous="doc of init", reproducible=True) as comm:
    ...     comm.reproducible
    True
    """
    if timeout_s is not None:
        timeout_s = check_timeout(timeout_s)
    if not (reproducible is None or isinstance(reproducible, bool)):
        raise TypeError(f"reproducible: expected True or False, not {reproducible!r:.60}")
    settings = config.override(config.settings(), timeout_s=timeout_s, reproducible=reproducible)
    if rank is None and size is None and rendezvous is None:
        world = config.launched_rank()
    elif rank is None or size is None or rendezvous is None:
        raise ValueError("give rank, size and rendezvous together, or none of them")
    elif not isinstance(rendezvous, str):
        raise TypeError(f"rendezvous: expected a text, not {rendezvous!r}")
    else:
        rank, size = whole(rank, "rank"), whole(size, "size")
        world = config.LaunchedRank(rank=rank, size=size, rendezvous=rendezvous)
    return join(world, settings, selection=selection)


def join(
    world: config.LaunchedRank,
    settings: config.Settings,
    *,
    board: BootstrapStore | None = None,
    selection: Selectable | None = None,
) -> Communicator:
    """The same for a rank that knows its world. `board`: where the ranks find each other, whatever
    the world's rendezvous says. Raises as `init` does.

    >>> alone = config.LaunchedRank(rank=0, size=1, rendezvous="example of join")
    >>> with join(alone, config.Settings()) as comm:
    ...     comm.size
    1
    """
    meeting = GroupConfig(
        rank=world.rank,
        size=world.size,
        rendezvous=world.rendezvous,
        timeout_s=settings.timeout_s,
        staging_bytes=settings.staging_bytes,
        single_copy=settings.single_copy,
        rank0_data=own_table(settings, selection, native.usable_cores()).pack(),
    )
    native.settle_on_core(world.rank)
    return Communicator(meeting, settings, met=join_group(meeting, settings, board))
