"""Going on without the ranks that were lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from unisono.bootstrap import GroupConfig
from unisono.communicator.arguments import check_timeout, whole
from unisono.recovery import RecoveryRequest, recover
from unisono.selection import Selectable

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator


def shrink(
    self: Communicator,
    exclude: Sequence[int] = (),
    *,
    timeout_s: float | None = None,
    selection: Selectable | None = None,
) -> Communicator:
    """A communicator of the ranks that are left, in the order of their ranks here.

    Collective over those ranks alone, which all get the same members, and possible in any state:
    after `PeerLostError` and every other `CommunicationError`, after another rank's mistake, and
    when nothing has happened. Afterwards this communicator is refused (a healthy one ends with
    `AbortedError`); the new one has its settings, timeout and selection, `selection` as for
    `split`, and says in `former_ranks` who its ranks were.

    - Who dies before the new group stands is left out too; who dies later is found by the next call
      on it, and can be shrunk away in turn.
    - Whoever is alive is waited for, `timeout_s` (default: that of this communicator). Who has not
      come by then is treated as lost, and logged; when it comes later it gets `AbortedError`.
      With ranks stopped in the middle it can take a few times as long.
    - `exclude`: ranks to be left out, the same on all that call this. On one host they may live;
      they do not call this, and are told by the next call that they make here. Over several hosts
      it is also your word that they have ended, or never shrink on their own: see below.

    A rank whose call raises has left the group, unless it reached too few (see below): the others
    go on without it. One that has not seen the failure comes when its own call fails: after a loss
    within a second; where one rank alone wants to shrink it calls `abort` first.

    Over several hosts the ranks go on that reach the hosts of more than half of all ranks, or of
    half with the lowest. A host counts with all its ranks while one of them lives there and
    answers: its kernel knows which of the others are dead. A host that does not answer may live
    beyond a cut, whatever its address says.

    Ranks that reach fewer get `AbortedError`, which says whom they reach and what it takes. They
    may call this once more with `exclude`: the excluded are not counted. If excluded ranks live
    after all, and cannot be reached, they may go on too: then there are two groups, each of which
    takes itself for the only one, and both write the same files. So exclude only ranks whose
    processes you know to have ended, as from the scheduler.

    Raises `AbortedError` if the others go on without this rank, or may do so beyond a cut;
    `UnsupportedError` in a batch and where MPI is the wire; `TypeError` or `ValueError` for ranks
    that cannot be excluded: that are no numbers, not of this communicator, or this rank itself.

    >>> import unisono
    >>> old = unisono.init(rank=0, size=1, rendezvous="example of shrink")
    >>> with old.shrink() as comm:
    ...     comm.size, comm.former_ranks
    (1, (0,))
    """
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
        rank0_data=self._engine.book.table.under(selection).pack(),
    )
    found = recover(self._group, asked, self._span)
    meeting = GroupConfig(
        rank=found.members.index(self.rank),
        size=len(found.members),
        rendezvous="",  # they have met
        timeout_s=self.timeout_s,
        staging_bytes=self._settings.staging_bytes,
    )
    shrunk = type(self)(meeting, self._settings, met=found.joined)
    shrunk.timeout_s = self.timeout_s
    shrunk.former_ranks = found.members
    return shrunk


def _excluded(comm: Communicator, exclude: Sequence[int]) -> frozenset[int]:
    if not isinstance(exclude, Iterable):
        raise TypeError(f"exclude: expected ranks such as [2, 3], not {exclude!r:.60}")
    ranks = frozenset(whole(rank, "exclude") for rank in exclude)
    wrong = sorted(rank for rank in ranks if not 0 <= rank < comm.size)
    if wrong:
        raise ValueError(f"cannot exclude {wrong}: the ranks are 0..{comm.size - 1}")
    if comm.rank in ranks:
        raise ValueError(
            f"rank {comm.rank} is to be excluded: it must not call shrink. Each of the ranks that "
            f"are left calls it, and excludes the same others"
        )
    return ranks
