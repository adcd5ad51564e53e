"""Recovery: continues a program without the ranks that were lost.

Over several hosts, ranks continue only if they reach the hosts of more than half of all ranks, or
of exactly half including the lowest rank. If one rank of a host is alive and answers, all ranks of
the host count, since its kernel knows which of them are dead. A host that does not answer may be
alive behind a network partition.

Ranks that reach fewer ranks get `AbortedError`, which lists the reached ranks and the number
needed. They may call `shrink` once more with `exclude`; excluded ranks do not count. If excluded
ranks are alive but unreachable, they may continue too. Then each of two groups considers itself the
only group, and both write the same files. So exclude only ranks whose processes have certainly
ended, for example according to the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from unisono.bootstrap import GroupConfig
from unisono.communicator.arguments import as_integer, check_timeout
from unisono.selection import Selectable

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator
    from unisono.recovery import RecoveredGroup


def shrink(
    self: Communicator,
    exclude: Sequence[int] = (),
    *,
    timeout_s: float | None = None,
    selection: Selectable | None = None,
) -> Communicator:
    """Makes a communicator of the remaining ranks, in their order in this communicator.

    Collective over the remaining ranks; all of them get the same members. The call is possible in
    any state: after any `CommunicationError`, after an error of another rank, and without an error.
    Afterwards this communicator refuses all work, and its pending calls end with `AbortedError`.
    The new communicator has the same settings, timeout and selection. For `selection`, see `split`.
    The new communicator's `former_ranks` are the ranks' numbers in this communicator.

    - A rank that dies before the new group is complete is excluded too. The next call on the new
      group detects a rank that dies later; another `shrink` can then remove it.
    - The ranks wait `timeout_s` (default: this communicator's timeout) for every living rank. A
      rank that arrives later is treated as lost, with a log entry, and gets `AbortedError`. If
      ranks stop during the recovery, the wait can take a few times as long.
    - `exclude` lists ranks to exclude; it must be equal on all calling ranks. On one host, excluded
      ranks may be alive. They do not call `shrink`, and their next call on this communicator raises
      an error. Over several hosts, `exclude` also asserts that these ranks have ended or never
      shrink on their own.

    A rank whose `shrink` raises has left the group, and the others continue without it, unless it
    reached too few ranks. A rank that has not yet detected the failure joins when its own call
    fails, less than a second after a loss. If only one rank wants to shrink, it calls `abort`
    first.

    Over several hosts, ranks continue only if they reach more than half of all ranks, or exactly
    half including the lowest rank. Ranks that reach fewer ranks get `AbortedError` and may call
    `shrink` again with `exclude`. The module `unisono.communicator.shrink` states the rules and the
    risk.

    Raises `AbortedError` if the other ranks continue without this rank, or may do so behind a
    partition; `UnsupportedError` in a batch and if MPI is the transport; `TypeError` or
    `ValueError` if `exclude` has values that are not integers, ranks of another communicator, or
    this rank itself.

    >>> import unisono
    >>> old = unisono.init(rank=0, size=1, rendezvous="example of shrink")
    >>> with old.shrink() as comm:
    ...     comm.size, comm.former_ranks
    (1, (0,))
    """
    from unisono.recovery import RecoveryRequest, recover  # few programs need it

    self._engine.refuse_in_batch("shrink")
    self._group.present(self.rank)  # raises if this communicator is closed
    limit_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
    asked = RecoveryRequest(
        name=self._name,
        rank=self.rank,
        ranks=self.size,
        exclude=_excluded(self, exclude),
        timeout_s=limit_s,
        staging_bytes=self._settings.staging_bytes,
        rank0_data=self._engine.call_cache.table.under(selection).pack(),
    )
    found = recover(self._group, asked, self._network)
    return _joined(self, found)


def _joined(former: Communicator, found: RecoveredGroup) -> Communicator:
    """Returns the communicator of a recovered group, with the settings of the former
    communicator.
    """
    group_config = GroupConfig(
        rank=found.members.index(former.rank),
        size=len(found.members),
        rendezvous="",  # not needed: recovery has already connected the ranks
        timeout_s=former.timeout_s,
        staging_bytes=former._settings.staging_bytes,
    )
    shrunk = type(former)(group_config, former._settings, joined=found.joined)
    shrunk.timeout_s = former.timeout_s
    shrunk.former_ranks = found.members
    return shrunk


def _excluded(comm: Communicator, exclude: Sequence[int]) -> frozenset[int]:
    if not isinstance(exclude, Iterable):
        raise TypeError(f"exclude: expected a list of ranks such as [2, 3], not {exclude!r:.60}")
    ranks = frozenset(as_integer(rank, "exclude") for rank in exclude)
    wrong = sorted(rank for rank in ranks if not 0 <= rank < comm.size)
    if wrong:
        raise ValueError(f"exclude: expected ranks of 0..{comm.size - 1}, not {wrong}")
    if comm.rank in ranks:
        raise ValueError(
            f"exclude: rank {comm.rank} excludes itself, but an excluded rank must not call "
            f"shrink. Call it on the other ranks, with the same list"
        )
    return ranks
