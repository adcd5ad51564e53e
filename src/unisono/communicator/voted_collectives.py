"""Voted calls: collectives that run only if every rank is ready.

Each rank begins a voted call with its vote, which states whether the rank is ready. The ranks first
reduce the votes, 8 bytes, to their minimum. If all ranks are ready, the collective follows at once
within the same call, and no Python runs in between. Otherwise the call is void: it ends without an
error and changes no array. So a rank may begin a voted call before it knows whether the others are
ready, and a rank that is not ready can end the wait of the others. `voted_all_reduce.py` has
an all_reduce that is voted for many times, whose data may carry the vote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.communicator import collective_calls, python_reductions, v_collective_calls
from unisono.communicator.arrays import Array
from unisono.communicator.communicator import Communicator
from unisono.communicator.engine import Call
from unisono.communicator.fused_all_reduce import FusedAllReduce
from unisono.communicator.row_counts import RowBuffer
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
        return collective_calls.in_place(engine, Op.BROADCAST, x, "sum", root, None)
    if operation == "reduce_scatter":
        return python_reductions.reduce_scatter(engine, x, None, op, None)
    if operation == "all_to_all":
        return collective_calls.all_to_all(engine, x, None, None)
    if operation == "all_gather" and lengths:
        place = RowBuffer(None, False)
        return v_collective_calls.gathering_rows(engine, Op.ALL_GATHER, x, lengths, -1, place, None)
    if operation == "all_gather":
        return collective_calls.gathering(engine, Op.ALL_GATHER, x, None, -1, None)
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


def _finish_if_ran(call: Call, votes: np.ndarray) -> Callable[[], Any]:
    return lambda: call.finish() if votes[0] else None
