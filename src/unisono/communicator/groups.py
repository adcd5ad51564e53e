"""Communicators for some ranks of a communicator."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from unisono import config
from unisono.bootstrap import WATCH_S, GroupConfig
from unisono.communicator.arguments import as_int64, as_integer
from unisono.communicator.call_cache import CallRequest
from unisono.communicator.call_volume import made_internal
from unisono.communicator.engine import Call, Engine
from unisono.communicator.own_exchange import exchange_of
from unisono.errors import CommunicationError, RendezvousError
from unisono.selection import Selectable, SelectionTable
from unisono.types import DType, Op, ReduceOp

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator
    from unisono.communicator.work import Work

_TOKEN_BYTES = 16
_CAUSE_S = 0.2


def split(
    self: Communicator,
    color: int | None,
    key: int = 0,
    *,
    selection: Selectable | None = None,
    reproducible: bool | None = None,
) -> Communicator | None:
    """Makes one communicator for each color. Ranks of a color are ordered by key, then by their
    rank in this communicator.

    Collective over all ranks; ranks with color None get None. `selection` (a `Selection` or a file)
    has priority over this communicator's own selection. The new rank 0's `selection` applies to its
    group. `reproducible` is as for `init`; None means the value of this communicator.
    """
    table = self._engine.collective("split", False, _exchange, color, key)
    if color is None:
        return None
    same = [r for r in range(self.size) if table[r, 0] and table[r, 1] == color]
    ordered = sorted(same, key=lambda r: (int(table[r, 2]), r))
    name = "split-" + table[ordered[0], 3:].tobytes().hex()
    with _named_in_errors(f"split of ranks {ordered}", ""):
        return _child(self, ordered, name, selection, reproducible)


def _exchange(engine: Engine, color: int | None, key: int) -> Call:
    """Returns the call that gathers color, key and a random token of each rank.

    The token of a group's first rank becomes part of the group's name.
    """
    member = [0, 0] if color is None else [1, as_int64(color, "color")]
    token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.int64)
    return exchange_of(engine, "split", [*member, as_int64(key, "key"), *token])


def group(
    self: Communicator, ranks: Sequence[int], *, selection: Selectable | None = None
) -> Communicator | None:
    """Makes a communicator of these ranks, in this order.

    Collective over these ranks only; returns None at once on other ranks. For `selection`, see
    `split`.
    """
    self._require_open()
    ordered = [as_integer(rank, "a rank") for rank in ranks]
    if len(set(ordered)) != len(ordered) or not all(0 <= r < self.size for r in ordered):
        raise ValueError(f"ranks: expected distinct ranks of 0..{self.size - 1}, not {ordered}")
    if self.rank not in ordered:
        return None
    members = tuple(ordered)
    self._group_calls[members] += 1
    name = f"group-{self._name}-{members}-{self._group_calls[members]}"
    with _named_in_errors(f"group({ordered})", "; all its ranks must call it with the same list"):
        return _child(self, ordered, name, selection)


@contextmanager
def _named_in_errors(call: str, advice: str) -> Iterator[None]:
    """Adds the call and `advice` to the text of a `RendezvousError`."""
    try:
        yield
    except RendezvousError as error:
        raise RendezvousError(f"{call}: {error}{advice}") from error


def _child(
    self: Communicator,
    ranks: Sequence[int],
    rendezvous: str,
    selection: Selectable | None,
    reproducible: bool | None = None,
) -> Communicator:
    watch = partial(_require_all, self, ranks)
    group_config = GroupConfig(
        rank=ranks.index(self.rank),
        size=len(ranks),
        rendezvous=rendezvous,
        timeout_s=self.timeout_s,
        staging_bytes=self._settings.staging_bytes,
        single_copy=self._settings.single_copy,
        rank0_data=self._engine.call_cache.table.under(selection).pack(),
        watch=watch,
    )
    joined = None
    if self._network is not None:
        joined = self._network.network.form(
            group_config, [self._network.members[rank] for rank in ranks]
        )
    settings = config.override(self._settings, reproducible=reproducible)
    child = type(self)(group_config, settings, joined=joined)
    child.timeout_s = self.timeout_s
    child._timeline = self._timeline
    if child._network is not None:
        with _closed_on_failure(child):
            _adopt_table(child, group_config.rank0_data, self, watch)
    return child


def _require_all(self: Communicator, ranks: Sequence[int]) -> None:
    """Raises the failure of this communicator, or `RendezvousError` if one of `ranks` has left
    it.
    """
    self._group.require_healthy()
    gone = [rank for rank in ranks if rank != self.rank and not self._group.present(rank)]
    if gone:
        raise RendezvousError(f"ranks {gone} have left this communicator or died")


@contextmanager
def _closed_on_failure(child: Communicator) -> Iterator[None]:
    """Closes the new group after an error, even if the program keeps the error and its
    traceback.
    """
    try:
        yield
    except BaseException as error:
        with suppress(CommunicationError):
            child.abort(str(error))
        child.close()
        raise


@contextmanager
def _cause_in_parent(parent: Communicator, watch: Callable[[], None]) -> Iterator[None]:
    """Replaces an error of the new group by the failure of the parent, if there is one soon.

    If the parent fails, some ranks know it before others. They close the new group, so the others
    may lose their connections to these ranks before they hear of the parent's failure.
    """
    try:
        yield
    except CommunicationError:
        watch()
        end_s = time.monotonic() + _CAUSE_S
        while time.monotonic() < end_s:
            parent._group.require_healthy()
            time.sleep(WATCH_S)
        raise


def _adopt_table(
    self: Communicator, rank0_data: bytes, parent: Communicator, watch: Callable[[], None]
) -> None:
    """Copies rank 0's selection table to all ranks of a group over several hosts.

    On one host the table comes with the group's shared memory.

    `watch` raises if a rank of the group can no longer arrive. Ranks that have arrived report
    failures to the new group, and may leave the parent communicator as soon as this function
    returns. So every rank watches the parent until all ranks have arrived, and no rank returns
    before all ranks have stopped watching. The two copies ensure this, since a copy ends on a rank
    only after all ranks have begun it.
    """
    engine, first = self._engine, self.rank == 0
    # Use the cost model until the table arrives: the ranks' own tables may differ, and a rule may
    # not fit this group's size.
    engine.adopt_table(SelectionTable(cores=engine.call_cache.table.cores))
    length = np.array([len(rank0_data) if first else 0])
    with _cause_in_parent(parent, watch):
        work = _begin_copy_of_rank_0(engine, length)
        while not work.is_completed():
            watch()
            with suppress(TimeoutError):
                work.wait(WATCH_S)
        work.wait()
    packed = np.frombuffer(rank0_data, np.uint8).copy() if first else np.zeros(length[0], np.uint8)
    _begin_copy_of_rank_0(engine, packed).wait()
    engine.adopt_table(SelectionTable.unpack(packed.tobytes()))


def _begin_copy_of_rank_0(engine: Engine, x: np.ndarray) -> Work:
    """Begins to copy rank 0's `x` to all ranks, whose own `x` is zero.

    The copy is an all_reduce, since a broadcast may end on a rank before others have arrived.
    """
    request = CallRequest(Op.ALL_REDUCE, (x.nbytes,), DType.UINT8, ReduceOp.MAX)
    where = [(x.ctypes.data, x.nbytes)]
    call = made_internal(engine.call_cache.call(request))
    return engine.begin("split", Call(call, where, where, x, x))
