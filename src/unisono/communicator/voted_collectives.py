"""Voted calls: collectives that run only if every rank is ready.

Each rank begins a voted call with its vote, which states whether the rank is ready. The ranks first
reduce the votes, 8 bytes, to their minimum. If all ranks are ready, the collective follows at once
within the same call, and no Python runs in between. A small all_reduce can carry the vote as one
more element (`carried_votes.py`). If a rank is not ready, the call is void: it ends without an
error and changes no array. So a rank may begin a voted call before it knows whether the others are
ready, and a rank that is not ready can end the wait of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono import native
from unisono.communicator import collectives, custom, v_collective_calls
from unisono.communicator.array_rows import RowBuffer
from unisono.communicator.arrays import Array, Staged, locate, stage
from unisono.communicator.call_volume import made_internal
from unisono.communicator.calls import CallRequest, parse_reduction
from unisono.communicator.carried_votes import can_carry, vote_elements
from unisono.communicator.communicator import Communicator
from unisono.communicator.engine import Call
from unisono.communicator.work import CollectiveWork
from unisono.errors import UnsupportedError
from unisono.types import Op


class VotedWork:
    """The handle of a voted call."""

    __slots__ = ("_votes", "_work")

    def __init__(self, work: CollectiveWork, votes: np.ndarray) -> None:
        self._work = work
        self._votes = votes

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the end of the call. Returns the result; None if the call was void because a
        rank was not ready. Raises the errors of `Work.wait`.
        """
        return self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        """Returns True if the call has ended, with or without an error."""
        return self._work.is_completed()

    @property
    def ran(self) -> bool:
        """True if all ranks were ready. Meaningful once the call has ended."""
        return bool(self._votes[0])


class CopiedWork:
    """The handle of a voted call on copies of arrays that are not contiguous."""

    __slots__ = ("_staged", "_work")

    def __init__(self, work: native.VotedWork, staged: Sequence[Staged]) -> None:
        self._work = work
        self._staged = staged

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the call. Copies the result to the arrays if the call ran."""
        self._work.wait(timeout_s)
        if self.ran:
            for each in self._staged:
                each.restore()

    def is_completed(self) -> bool:
        """Returns True if the call has ended, with or without an error."""
        return self._work.is_completed()

    @property
    def ran(self) -> bool:
        """True if all ranks were ready. Meaningful once the call has ended."""
        return self._work.ran


def call_of(
    comm: Communicator,
    operation: str,
    arrays: Sequence[Array],
    *,
    op: str = "sum",
    root: int = -1,
    lengths: Sequence[int] = (),
) -> Call:
    """Returns the call of a collective by its name, for `begin_voted` and `begin_unvoted`.

    An all_reduce may have several arrays, which are sent as one message. If the ranks of an
    all_gather have different numbers of rows, `lengths` are these numbers.
    """
    engine, x = comm._engine, arrays[0]
    if operation == "all_reduce":
        return FusedAllReduce(comm, arrays, op).call(arrays)
    if operation == "broadcast":
        return collectives.in_place(engine, Op.BROADCAST, x, "sum", root, None)
    if operation == "reduce_scatter":
        return custom.reduce_scatter(engine, x, None, op, None)
    if operation == "all_to_all":
        return collectives.all_to_all(engine, x, None, None)
    if operation == "all_gather" and lengths:
        place = RowBuffer(None, False)
        return v_collective_calls.gathering_rows(engine, Op.ALL_GATHER, x, lengths, -1, place, None)
    if operation == "all_gather":
        return collectives.gathering(engine, Op.ALL_GATHER, x, None, -1, None)
    raise UnsupportedError(f"no such collective: {operation!r}")


def begin_voted(comm: Communicator, name: str, call: Call | None) -> VotedWork:
    """Begins a voted collective. This rank votes yes, or no if `call` is None."""
    engine = comm._engine
    votes = np.array([call is not None], np.int64)
    finish = None if call is None else _finish_if_ran(call, votes)
    vote = engine.call_cache.vote()
    return VotedWork(engine.begin_voted(name, vote, votes, call, finish), votes)


def begin_unvoted(comm: Communicator, name: str, call: Call) -> CollectiveWork:
    """Begins a collective without a vote. The caller must know that all ranks are ready."""
    return comm._engine.begin(name, call)


class FusedAllReduce:
    """An all_reduce of several arrays as one message, in place; made once, called many times.

    The arrays of all calls have the same types and lengths as `arrays`. A single array is reduced
    in place. Several arrays are copied into one buffer, and back at the end.
    """

    def __init__(
        self, comm: Communicator, arrays: Sequence[Array], op: str, *, carries_vote: bool = False
    ) -> None:
        """`carries_vote`: a small voted call carries its vote, and does not know when the ranks
        agreed (`times_ns`).

        Raises `UnsupportedError` or `TypeError` for arrays that this operation cannot reduce.
        """
        self._comm = comm
        staged = [stage(array, writable=True) for array in arrays]
        self._lengths = tuple(each.located[1] for each in staged)
        self._dtype, self._reduction = staged[0].dtype, parse_reduction(op)
        total = sum(self._lengths)
        self._prepared = self._prepare(self._lengths)
        self._carries_vote = carries_vote and can_carry(self._dtype, self._reduction, total)
        self._voted: native.VotedAllReduce | None = None
        """Prepared vote and all_reduce, with a buffer of its own; None until the first voted
        call.
        """
        self._buffer = np.empty(total if len(arrays) > 1 else 0, np.uint8)

    def _prepare(self, lengths: tuple[int, ...]) -> native.Prepared:
        cache = self._comm._engine.call_cache
        request = CallRequest(
            Op.ALL_REDUCE, (sum(lengths),), self._dtype, self._reduction, packed=lengths
        )
        cache.check(request)
        if cache.widens(request):
            # The usual algorithm for the total length would round more than once. Use the algorithm
            # for the shortest array, which rounds each result once.
            small = cache.choose(request.op, min(lengths), dtype_bytes=2, narrow=True)
            request = request._replace(algorithm=small.plan.name)
        if len(lengths) == 1:
            request = request._replace(packed=())
        return cache.call(request)

    def begin_voted(self, arrays: tuple[Array, ...]) -> VotedWork | CopiedWork | native.VotedWork:
        """Votes for the reduction of these arrays and begins it. The previous call must have
        ended.
        """
        work = self._prepared_vote().begin(arrays, self._comm.timeout_s)
        if work is not None:
            return work
        # An array must be copied first, for example because it is not contiguous.
        if self._carries_vote:
            return self._begin_copied([stage(array, writable=True) for array in arrays])
        return begin_voted(self._comm, "all_reduce", self.call(arrays))

    def begin_void(self) -> VotedWork | native.VotedWork:
        """Votes against the reduction, because this rank is not ready. The previous call must have
        ended.
        """
        if self._carries_vote:
            return self._prepared_vote().begin_void(self._comm.timeout_s)
        return begin_voted(self._comm, "void call", None)

    def _begin_copied(self, staged: Sequence[Staged]) -> CopiedWork:
        contiguous = [each.array if each.copy is None else each.copy for each in staged]
        work = self._prepared_vote().begin(tuple(contiguous), self._comm.timeout_s)
        if work is None:
            raise TypeError(
                "all_reduce: expected arrays of the types and lengths of the first call"
            )
        return CopiedWork(work, staged)

    def _prepared_vote(self) -> native.VotedAllReduce:
        if self._voted is None:
            self._voted = self._prepare_vote()
        return self._voted

    def _prepare_vote(self) -> native.VotedAllReduce:
        engine = self._comm._engine
        if not self._carries_vote:
            return engine.voted_all_reduce(engine.call_cache.vote(), self._prepared, self._lengths)
        size_bytes = self._dtype.size_bytes
        alone = CallRequest(Op.ALL_REDUCE, (size_bytes,), self._dtype, self._reduction)
        vote = made_internal(engine.call_cache.call(alone))
        both = self._prepare((*self._lengths, size_bytes)).with_volume(vote.volume)
        elements = vote_elements(self._dtype, self._reduction)
        return engine.vote_carrying_all_reduce(both, self._lengths, elements, self._prepared)

    def call(self, arrays: Sequence[Array]) -> Call:
        """Returns the call that reduces these arrays. The previous call must have ended."""
        pack = native.Pack()
        copied: list[Staged] = []
        for array in arrays:
            located = locate(array, True)
            if located is None:
                staged = stage(array, writable=True)
                copied.append(staged)
                located = staged.located
            pack.add(located[0], located[1], array)
        if len(arrays) == 1:
            where = pack.memory()
            restore = copied[0].restore if copied else None
            return Call(self._prepared, where, where, None, (pack, copied), complete=restore)
        address = self._buffer.ctypes.data
        pack.gather(address)
        where = [(address, self._buffer.nbytes)]

        def complete() -> None:
            pack.scatter(address)
            for each in copied:
                each.restore()

        keep = (self, pack, copied)  # `self` must stay alive, since it owns the buffer
        return Call(self._prepared, where, where, None, keep, complete=complete)


def _finish_if_ran(call: Call, votes: np.ndarray) -> Callable[[], Any]:
    return lambda: call.finish() if votes[0] else None
