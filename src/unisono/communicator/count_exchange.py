"""Exchange of counts: ranks that cannot know the lengths of a call exchange them first.

One call of the program runs a small all_gather of the counts, then the actual call. The thread that
runs the calls prepares the actual call from the counts, and runs no other call in between. So an
asynchronous call still returns at once. All ranks see the same table of counts, so all detect the
same disagreement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.communicator.arrays import stage
from unisono.communicator.collective_memory import memory_of
from unisono.communicator.engine import Call, DeferredResult, Engine, LaterUse, PreparedCall
from unisono.communicator.row_counts import ANY, Rows, Table
from unisono.schedule import Schedule
from unisono.types import Op

_NAMES = ("x", "x[{}]", "out", "out[{}]", "send_counts[{}]", "recv_counts[{}]")


class ExchangedCounts(NamedTuple):
    """The counts that one rank sends to all others, in rows.

    `to_send` are the rows to each rank, `to_receive` the rows from each rank, `available` the rows
    of `x`, `capacity` the rows that fit in `out`. Each may be `ANY` (unknown here), but sender or
    receiver must know the rows between them. For errors, `to_send_name` and `to_receive_name` name
    the arguments with these counts; both are in `_NAMES`.
    """

    to_send: list[int]
    to_receive: list[int]
    available: int = ANY
    capacity: int = ANY
    to_send_name: str = "x"
    to_receive_name: str = "out"


def with_exchanged_counts(
    engine: Engine,
    op: Op,
    row: Rows,
    root: int,
    algorithm: str | Schedule | None,
    own_counts: ExchangedCounts,
    proceed: Callable[[Table], Call],
    later: LaterUse,
    result: Any = None,
) -> Call:
    """Returns a call that exchanges counts, then runs the call that `proceed` makes from the
    counts.

    `row` is the unit of the counts. `later` has the arrays of the second call. `result` is the
    result of the call if it is known before the exchange, else a `DeferredResult`. Raises the
    errors of `CallCache.check_uneven`.
    """
    engine.call_cache.check_uneven(op, root, algorithm)
    names = _NAMES.index(own_counts.to_send_name), _NAMES.index(own_counts.to_receive_name)
    mine = np.array(
        [
            *own_counts.to_send,
            *own_counts.to_receive,
            own_counts.available,
            own_counts.capacity,
            *names,
            row.nbytes,
        ],
        np.int64,
    )
    everything = np.empty((engine.size, mine.size), np.int64)
    exchange = Call(
        engine.call_cache.exchange(op, row.dtype, root, mine.nbytes),
        memory_of([stage(mine, writable=False)], 1),
        memory_of([stage(everything, writable=True)], engine.size),
        None,
        (mine, everything),
    )
    return followed_by(
        exchange, lambda: proceed(_agreed(engine, op, row, everything)), later, result
    )


def followed_by(first: Call, proceed: Callable[[], Call], later: LaterUse, result: Any) -> Call:
    """Returns one call that runs `first`, then the call that `proceed` returns, with the arrays of
    `later`.

    An error of `proceed` aborts the group on all ranks, so the caller should make its local checks
    first. For `result`, see `with_exchanged_counts`.
    """
    made: list[Call] = []

    def then() -> PreparedCall:
        call = proceed()
        made.append(call)
        return call.prepared, call.inputs, call.outputs

    def complete() -> None:
        outcome = made[0].finish()
        if isinstance(result, DeferredResult):
            result.value = outcome

    keep = first.keep, made
    return Call(
        first.prepared, first.inputs, first.outputs, result, keep, None, complete, then, later
    )


def _agreed(engine: Engine, op: Op, row: Rows, everything: Table) -> Table:
    """Returns the number of rows from each rank to each rank. Raises `MismatchError` on all ranks
    if two ranks disagree.
    """
    n = engine.size
    to_send, to_receive = everything[:, :n], everything[:, n : 2 * n].T
    rest = everything[:, 2 * n :]
    usual = rest[0, 0] == rest[0, 1] == ANY and (rest == rest[0]).all()
    if usual and (to_send == to_receive).all() and (to_send != ANY).all():
        return to_send  # without the search for a difference
    _require_one_width(engine, op, row, everything[:, -1])
    sent = np.where(to_send == ANY, to_receive, to_send)
    kind = row.dtype.name.lower()
    for src, dst in np.argwhere((to_receive != ANY) & (to_receive != sent)):
        given = _NAMES[everything[src, -3]].format(dst)
        taken = _NAMES[everything[dst, -2]].format(src)
        engine.disagree(
            f"{op}: rank {src} sends {_text(sent[src, dst], row)} of {kind} to rank {dst}, which "
            f"receives {_text(to_receive[src, dst], row)}: {given} of rank {src} and {taken} of "
            f"rank {dst} must be equal"
        )
    available, capacity = everything[:, 2 * n], everything[:, 2 * n + 1]
    for rank in np.flatnonzero((available != ANY) & (available != sent.sum(axis=1))):
        engine.disagree(
            f"{op}: x of rank {rank} has {_text(available[rank], row)} of {kind}, but the others "
            f"receive {_text(sent[rank].sum(), row)}"
        )
    for rank in np.flatnonzero((capacity != ANY) & (capacity != sent.sum(axis=0))):
        engine.disagree(
            f"{op}: out of rank {rank} has {_text(capacity[rank], row)}, but the others send "
            f"{_text(sent[:, rank].sum(), row)} of {kind}"
        )
    return sent


def _require_one_width(engine: Engine, op: Op, row: Rows, nbytes: NDArray[np.int64]) -> None:
    if len(set(nbytes.tolist())) > 1:
        each = ", ".join(
            f"rank {rank} has {width} elements a row"
            for rank, width in enumerate(nbytes // row.dtype.size_bytes)
        )
        engine.disagree(
            f"{op}_v: rows differ in width: {each} of {row.dtype.name.lower()}. Arrays may differ "
            "in their first dimension only"
        )


def _text(count: np.int64, row: Rows) -> str:
    return f"{count} {'rows' if row.shape else 'elements'} ({count * row.nbytes} bytes)"
