"""Ranks that cannot know how much comes tell each other first, within the same call.

The numbers go round in a small all_gather; what follows is made from them by whatever thread drives
the calls, with no other call in between. So an asynchronous call returns at once all the same, and
all ranks see the same table: they find the same disagreement, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.communicator.engine import Call, Engine, Later, Ready
from unisono.communicator.rows import ANY, Rows, Table
from unisono.schedule import Schedule
from unisono.types import Op

_NAMES = ("x", "x[{}]", "out", "out[{}]", "send_counts[{}]", "recv_counts[{}]")


class ExchangedCounts(NamedTuple):
    """What a rank tells: rows to and from each rank, rows that it has, rows that it has room for.

    Each may be `ANY`, but not the rows to a rank on both sides. What says how much a rank gives and
    takes has one of `_NAMES`.
    """

    gives: list[int]
    takes: list[int]
    has: int = ANY
    room: int = ANY
    gives_name: str = "x"
    takes_name: str = "out"


def negotiated(
    engine: Engine,
    op: Op,
    row: Rows,
    root: int,
    algorithm: str | Schedule | None,
    told: ExchangedCounts,
    proceed: Callable[[Table], Call],
    result: Any = None,
) -> Call:
    """The call that `proceed` makes, once all have told each other.

    `row` is what the numbers count; `result` is that of the call where it is known before, else a
    `Later`. Raises what `CallBook.check_uneven` does.
    """
    engine.book.check_uneven(op, root, algorithm)
    names = _NAMES.index(told.gives_name), _NAMES.index(told.takes_name)
    mine = np.array([*told.gives, *told.takes, told.has, told.room, *names, row.nbytes], np.int64)
    everything = np.empty((engine.size, mine.size), np.int64)
    where = [(each.ctypes.data, mine.nbytes) for each in everything]
    exchange = Call(
        engine.book.count_exchange(op, row.dtype, root, mine.nbytes),
        [(mine.ctypes.data, mine.nbytes)],
        where,
        None,
        (mine, everything),
    )
    return followed(exchange, lambda: proceed(_agreed(engine, op, row, everything)), result)


def followed(first: Call, proceed: Callable[[], Call], result: Any) -> Call:
    """`first`, and at once what `proceed` makes of what it brought: one call to the program.

    What `proceed` raises ends the group on all ranks; whatever only this rank can find wrong should
    be found before. `result` is as for `negotiated`.
    """
    made: list[Call] = []

    def then() -> Ready:
        call = proceed()
        made.append(call)
        return call.prepared, call.inputs, call.outputs

    def complete() -> None:
        outcome = made[0].finish()
        if isinstance(result, Later):
            result.value = outcome

    keep = first.keep, made
    return Call(first.prepared, first.inputs, first.outputs, result, keep, None, complete, then)


def _agreed(engine: Engine, op: Op, row: Rows, everything: Table) -> Table:
    """Who sends how much to whom; `MismatchError` on all ranks if two of them disagree."""
    n = engine.size
    _require_one_width(engine, op, row, everything[:, -1])
    gives, takes = everything[:, :n], everything[:, n : 2 * n].T
    sent = np.where(gives == ANY, takes, gives)
    kind = row.dtype.name.lower()
    for src, dst in np.argwhere((takes != ANY) & (takes != sent)):
        given = _NAMES[everything[src, -3]].format(dst)
        taken = _NAMES[everything[dst, -2]].format(src)
        engine.disagree(
            f"{op}: rank {src} sends {_text(sent[src, dst], row)} of {kind} to rank {dst}, which "
            f"receives {_text(takes[src, dst], row)}: {given} of rank {src} and {taken} of rank "
            f"{dst} must be equal"
        )
    has, room = everything[:, 2 * n], everything[:, 2 * n + 1]
    for rank in np.flatnonzero((has != ANY) & (has != sent.sum(axis=1))):
        engine.disagree(
            f"{op}: x of rank {rank} has {_text(has[rank], row)} of {kind}, but the others "
            f"receive {_text(sent[rank].sum(), row)}"
        )
    for rank in np.flatnonzero((room != ANY) & (room != sent.sum(axis=0))):
        engine.disagree(
            f"{op}: out of rank {rank} has {_text(room[rank], row)}, but the others send "
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
            "in their first axis only"
        )


def _text(count: np.int64, row: Rows) -> str:
    return f"{count} {'rows' if row.shape else 'elements'} ({count * row.nbytes} bytes)"
