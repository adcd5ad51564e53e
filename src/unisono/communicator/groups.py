"""Groups of some ranks of a communicator."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from unisono.bootstrap import WATCH_S, GroupConfig
from unisono.communicator.arguments import whole, word
from unisono.communicator.calls import CallRequest
from unisono.communicator.engine import Call, Engine
from unisono.errors import CommunicationError, RendezvousError
from unisono.selection import Selectable, SelectionTable
from unisono.types import DType, Op, ReduceOp

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator
    from unisono.communicator.work import Work

_TOKEN_BYTES = 16


def split(
    self: Communicator, color: int | None, key: int = 0, *, selection: Selectable | None = None
) -> Communicator | None:
    """One communicator for each color, ranks ordered by key, then by rank here.

    Collective over all ranks; those with color None get None. `selection` (a `Selection` or a
    file) comes before what this communicator chooses by; that of the new rank 0 counts.
    """
    table = self._engine.collective("split", False, _telling, color, key)
    if color is None:
        return None
    same = [r for r in range(self.size) if table[r, 0] and table[r, 1] == color]
    ordered = sorted(same, key=lambda r: (int(table[r, 2]), r))
    name = "split-" + table[ordered[0], 3:].tobytes().hex()
    with _naming(f"split of ranks {ordered}", ""):
        return _child(self, ordered, name, selection)


def _telling(engine: Engine, color: int | None, key: int) -> Call:
    """The call in which all ranks tell each other whether they have a color, which, their key, and
    what makes the name of a group that they lead."""
    engine.refuse_in_batch("split")
    member = [0, 0] if color is None else [1, word(color, "color")]
    token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.int64)
    mine = np.array([*member, word(key, "key"), *token], np.int64)
    table = np.empty((engine.size, mine.size), np.int64)
    inputs = [(mine.ctypes.data, mine.nbytes)]
    outputs = [(row.ctypes.data, row.nbytes) for row in table]
    return Call(engine.book.splitting(mine.nbytes), inputs, outputs, table, (mine, table))


def group(
    self: Communicator, ranks: Sequence[int], *, selection: Selectable | None = None
) -> Communicator | None:
    """A communicator of these ranks, in this order.

    Collective over those ranks alone; on others it returns None at once. `selection` as for
    `split`.
    """
    self._require_open()
    ordered = [whole(rank, "a rank") for rank in ranks]
    if len(set(ordered)) != len(ordered) or not all(0 <= r < self.size for r in ordered):
        raise ValueError(f"{ordered} are not distinct ranks of 0..{self.size - 1}")
    if self.rank not in ordered:
        return None
    members = tuple(ordered)
    self._forks[members] += 1
    name = f"group-{self._name}-{members}-{self._forks[members]}"
    with _naming(f"group({ordered})", "; all its ranks must call it with the same list"):
        return _child(self, ordered, name, selection)


@contextmanager
def _naming(call: str, advice: str) -> Iterator[None]:
    """Ranks that do not meet are told of what they called."""
    try:
        yield
    except RendezvousError as error:
        raise RendezvousError(f"{call}: {error}{advice}") from error


def _child(
    self: Communicator, ranks: Sequence[int], rendezvous: str, selection: Selectable | None
) -> Communicator:
    watch = partial(_require_all, self, ranks)
    meeting = GroupConfig(
        rank=ranks.index(self.rank),
        size=len(ranks),
        rendezvous=rendezvous,
        timeout_s=self.timeout_s,
        staging_bytes=self._settings.staging_bytes,
        single_copy=self._settings.single_copy,
        rank0_data=self._engine.book.table.under(selection).pack(),
        watch=watch,
    )
    met = None
    if self._span is not None:
        met = self._span.network.form(meeting, [self._span.members[rank] for rank in ranks])
    child = type(self)(meeting, self._settings, met=met)
    child.timeout_s = self.timeout_s
    if child._span is not None:
        with _given_up_on_failure(child):
            _adopt_table(child, meeting.rank0_data, watch)
    return child


def _require_all(self: Communicator, ranks: Sequence[int]) -> None:
    """Raises what this communicator failed with, and `RendezvousError` if a rank has left it."""
    self._group.require_healthy()
    gone = [rank for rank in ranks if rank != self.rank and not self._group.present(rank)]
    if gone:
        raise RendezvousError(f"ranks {gone} have left or are lost")


@contextmanager
def _given_up_on_failure(child: Communicator) -> Iterator[None]:
    """Of a group that came to nothing, nothing is left, whoever keeps the error."""
    try:
        yield
    except BaseException as error:
        with suppress(CommunicationError):
            child.abort(str(error))
        child.close()
        raise


def _adopt_table(self: Communicator, word: bytes, watch: Callable[[], None]) -> None:
    """Rank 0's table for all: on one host it is handed over when the ranks meet.

    `watch`, which may raise, looks for ranks that will never come. Who has come tells this group
    itself if it gives up, and may leave the other communicator as soon as this returns. So all
    ranks watch until all have come, and none returns before all have ceased to watch: each of the
    two calls ends on no rank before all have made it.
    """
    engine, first = self._engine, self.rank == 0
    # By the cost model until then: tables differ, and a rule in one may suit no group of this size.
    engine.adopt_table(SelectionTable(cores=engine.book.table.cores))
    length = np.array([len(word) if first else 0])
    work = _from_first(engine, length)
    while not work.is_completed():
        watch()
        with suppress(TimeoutError):
            work.wait(WATCH_S)
    work.wait()
    packed = np.frombuffer(word, np.uint8).copy() if first else np.zeros(length[0], np.uint8)
    _from_first(engine, packed).wait()
    engine.adopt_table(SelectionTable.unpack(packed.tobytes()))


def _from_first(engine: Engine, x: np.ndarray) -> Work:
    """Begins to bring rank 0's `x` to all; the others' is zero. A reduction, since a broadcast may
    end on a rank before others have come."""
    request = CallRequest(Op.ALL_REDUCE, (x.nbytes,), DType.UINT8, ReduceOp.MAX)
    where = [(x.ctypes.data, x.nbytes)]
    return engine.begin("split", Call(engine.book.call(request), where, where, x, x))
