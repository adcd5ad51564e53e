"""A voted all_reduce of several arrays as one message, made once and begun many times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from unisono import native
from unisono.communicator.arrays import Array, Staged, stage
from unisono.communicator.call_cache import CallRequest
from unisono.communicator.call_volume import made_internal
from unisono.communicator.carried_votes import can_carry, vote_elements
from unisono.communicator.communicator import Communicator
from unisono.communicator.fused_all_reduce import FusedAllReduce
from unisono.communicator.voted_collectives import VotedWork, begin_voted
from unisono.types import Op


class VotedAllReduce:
    """A voted all_reduce. The arrays of all runs have the types and lengths of `arrays`.

    `begin(arrays)` votes for a run and begins the run. It returns the handle of the run, which has
    the methods of `VotedWork`. The program must have waited for the previous run, because the runs
    share a buffer. All runs have the timeout that the communicator has when this object is made.
    """

    def __init__(
        self, comm: Communicator, arrays: Sequence[Array], op: str, *, carries_vote: bool
    ) -> None:
        """`carries_vote`: True if a small all_reduce carries the vote (`carried_votes.py`).

        Raises `UnsupportedError` or `TypeError` for arrays that this operation cannot reduce.
        """
        self.begin_void: Callable[[], VotedWork | native.VotedWork]
        """Votes against a run, because this rank is not ready, and returns its handle."""
        fused = FusedAllReduce(comm, arrays, op)
        engine, size_bytes = comm._engine, fused.dtype.size_bytes
        if carries_vote and can_carry(fused.dtype, fused.reduction, sum(fused.lengths)):
            alone = CallRequest(Op.ALL_REDUCE, (size_bytes,), fused.dtype, fused.reduction)
            internal = made_internal(engine.call_cache.call(alone))
            call = fused.prepare((*fused.lengths, size_bytes)).with_volume(internal.volume)
            elements = vote_elements(fused.dtype, fused.reduction)
            vote = native.CarriedVote(*elements, fused.prepared)
            voted = engine.voted_all_reduce(
                vote, call, fused.lengths, partial(_begin_carrying_copies, fused)
            )
            self.begin_void = voted.begin_void
        else:
            begin_copied = partial(_begin_separate_copies, comm, fused)
            first = engine.call_cache.vote()
            voted = engine.voted_all_reduce(first, fused.prepared, fused.lengths, begin_copied)
            self.begin_void = partial(begin_voted, comm, "void call", None)
        self.begin = voted.begin


class CopiedWork:
    """The handle of a run on copies of arrays that are not contiguous."""

    __slots__ = ("_lock", "_staged", "_work")

    def __init__(self, work: native.VotedWork, staged: Sequence[Staged]) -> None:
        self._work = work
        self._staged = staged
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the run. The first wait copies the result to the arrays, if all
        ranks were ready.
        """
        self._work.wait(timeout_s)
        with self._lock:
            staged, self._staged = self._staged, ()
            for each in staged if self.ran else ():
                each.restore()

    def is_completed(self) -> bool:
        """Returns True if the run has ended, with or without an error."""
        return self._work.is_completed()

    @property
    def ran(self) -> bool:
        """True if all ranks were ready. Meaningful once the run has ended."""
        return self._work.ran


# The native core calls these functions for arrays that must be copied first.


def _begin_carrying_copies(
    fused: FusedAllReduce, voted: native.VotedAllReduce, arrays: tuple[Array, ...]
) -> CopiedWork:
    staged = _staged(fused, arrays)
    copies = tuple(each.array if each.copy is None else each.copy for each in staged)
    return CopiedWork(voted.begin(copies), staged)


def _begin_separate_copies(
    comm: Communicator,
    fused: FusedAllReduce,
    _voted: native.VotedAllReduce,
    arrays: tuple[Array, ...],
) -> VotedWork:
    _staged(fused, arrays)
    return begin_voted(comm, "all_reduce", fused.call(arrays))


def _staged(fused: FusedAllReduce, arrays: tuple[Array, ...]) -> list[Staged]:
    """Returns the arrays as contiguous memory. Raises `TypeError` if they differ from those of the
    first run.
    """
    staged = [stage(array, writable=True) for array in arrays]
    lengths = tuple(each.located[1] for each in staged)
    if lengths != fused.lengths or any(each.dtype is not fused.dtype for each in staged):
        raise TypeError("all_reduce: expected arrays of the types and lengths of the first run")
    return staged
