"""Joins the job's group of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import config, native
from unisono.bootstrap import GroupConfig, join_group
from unisono.communicator.arguments import as_integer, check_timeout
from unisono.communicator.communicator import Communicator
from unisono.communicator.selection_sources import own_table
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

    - Without arguments, rank, size and rendezvous come from `unisono.run`, torchrun, mpiexec or
      srun.
    - `rendezvous`: for ranks on one host, any text that is equal on all ranks and unique to the
      job. For several hosts, `tcp://host:port`; rank 0 listens on that host.
    - `timeout_s` (default 300) is the time limit in seconds of the join and of each call.
    - `reproducible` (default: `UNISONO_REPRODUCIBLE`, else False) makes the bits of every reduction
      independent of message size, algorithm and hosts. It must be equal on all ranks. Groups made
      by `split` and `group` inherit it.
    - `selection` (a `communicator.Selection` or a file) selects the algorithm of each call. It has
      priority over the environment and the built-in rules. Rank 0's selection applies to the whole
      group.

    Raises `RendezvousError` if the ranks do not find each other, `AuthenticationError` if this rank
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
    return join(_world(rank, size, rendezvous), settings, selection=selection)


def _world(rank: int | None, size: int | None, rendezvous: str | None) -> config.LaunchedRank:
    """Returns the rank that the arguments describe; without arguments, the rank that the launcher
    describes.
    """
    if rank is None and size is None and rendezvous is None:
        return config.launched_rank()
    if rank is None or size is None or rendezvous is None:
        raise ValueError("rank, size and rendezvous: expected all three or none of them")
    if not isinstance(rendezvous, str):
        raise TypeError(f"rendezvous: expected a text, not {rendezvous!r}")
    rank, size = as_integer(rank, "rank"), as_integer(size, "size")
    return config.LaunchedRank(rank=rank, size=size, rendezvous=rendezvous)


def join(
    world: config.LaunchedRank,
    settings: config.Settings,
    *,
    bootstrap_store: BootstrapStore | None = None,
    selection: Selectable | None = None,
) -> Communicator:
    """Joins the group of all ranks like `init`, with known rank, size and settings.

    The ranks find each other through `bootstrap_store` if given, else by the rendezvous of `world`.
    Raises the errors of `init`.

    >>> alone = config.LaunchedRank(rank=0, size=1, rendezvous="example of join")
    >>> with join(alone, config.Settings()) as comm:
    ...     comm.size
    1
    """
    group_config = GroupConfig(
        rank=world.rank,
        size=world.size,
        rendezvous=world.rendezvous,
        timeout_s=settings.timeout_s,
        staging_bytes=settings.staging_bytes,
        single_copy=settings.single_copy,
        rank0_data=own_table(settings, selection, native.usable_cores()).pack(),
    )
    native.settle_on_core(world.rank)
    return Communicator(
        group_config, settings, joined=join_group(group_config, settings, bootstrap_store)
    )
