"""The communicator: a rank's view of its group, and every collective on it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from unisono import config
from unisono.bootstrap import GroupConfig, JoinedGroup, join_group
from unisono.communicator import (
    collectives,
    custom,
    explain,
    groups,
    point_to_point,
    shrink,
    v_collectives,
)
from unisono.communicator.arguments import check_timeout
from unisono.communicator.arrays import Array
from unisono.communicator.batch import Batch
from unisono.communicator.custom import AnyReduction
from unisono.communicator.engine import Engine
from unisono.errors import AbortedError
from unisono.execution import OP_CODES
from unisono.schedule import Schedule
from unisono.selection import SelectionTable
from unisono.types import Op

_ALL_REDUCE = OP_CODES[Op.ALL_REDUCE]
_REDUCE_SCATTER = OP_CODES[Op.REDUCE_SCATTER]
_ALL_GATHER = OP_CODES[Op.ALL_GATHER]
_ALL_TO_ALL = OP_CODES[Op.ALL_TO_ALL]
_BROADCAST = OP_CODES[Op.BROADCAST]
_REDUCE = OP_CODES[Op.REDUCE]
_SCAN = OP_CODES[Op.SCAN]
_EXSCAN = OP_CODES[Op.EXSCAN]


class Communicator:
    """A group of ranks seen from one of them.

    Arrays are NumPy arrays or CPU torch tensors of any strides; one whose elements share memory, as
    after `expand`, can be read but takes no result: give its `.contiguous()`. Every collective must
    be called by all ranks, in one order and with matching arguments; a call that does not match
    raises `MismatchError` on all ranks. A rank whose arguments are wrong raises `ValueError`,
    `TypeError` or `UnsupportedError`; ranks whose arguments are right raise `MismatchError` with
    its reason, and if there are none, no harm was done. After any `CommunicationError` the
    communicator refuses further work with the same cause. Methods may be called from several
    threads, but then the program has to see to the common order.

    With `async_op=True` a method returns a `Work` at once; the arrays belong to the call until
    `Work.wait` has returned.

    `algorithm` is a name of `unisono.algorithms.names(...)`, or a `Schedule` for this operation,
    group and root: of your own, or read from a file. It is proved when it is first used; a wrong
    one raises `ScheduleError`, one that does not fit `UnsupportedError`.

    If `reproducible`, every reduction is one fold in the order of ranks, ((x0 + x1) + x2) + ...,
    so that the bits of an element depend on nothing but the contributions to it and the numbers of
    the ranks; an `algorithm` that folds in another way raises `UnsupportedError`.
    """

    def __init__(
        self, meeting: GroupConfig, settings: config.Settings, *, met: JoinedGroup | None = None
    ) -> None:
        met = met or join_group(meeting, settings)
        self.rank = meeting.rank
        self.size = meeting.size
        self.former_ranks: tuple[int, ...] = ()
        """Which ranks these were in the communicator that this one was shrunk from, if it was."""
        self._settings = settings
        self._group = met.group
        self._span = met.network
        self._engine = Engine(
            met.group,
            self.rank,
            self.size,
            settings,
            SelectionTable.unpack(met.rank0_data),
            met.network,
            single_copy=met.single_copy,
        )
        self._quick = self._engine.quick
        self._messages = self._engine.messages
        self._name = met.nonce.hex()
        self._forks: Counter[tuple[int, ...]] = Counter()
        # Also at the end of the interpreter: a rank that ends well has left, not died.
        self._finalizer = weakref.finalize(self, met.close)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size})"

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call gives up; may be set at any time."""
        return self._engine.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._engine.timeout_s = check_timeout(timeout_s)

    @property
    def reproducible(self) -> bool:
        """Whether reductions are limited to folds in the order of ranks."""
        return self._settings.reproducible

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return self._engine.book.hosts

    # ---- collectives in place

    def all_reduce(
        self,
        x: Array,
        op: AnyReduction = "sum",
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces `x` over all ranks, in place, on all ranks; returns `x`.

        `op`: one of

        - "sum", "prod", "min", "max", "avg"; sums of 16- and 8-bit floats accumulate in float32 and
          are rounded once, NaN is the least and the greatest of numbers;
        - for integers and booleans "band", "bor", "bxor", and of truth values (true unless 0, with
          results 0 or 1) "land", "lor", "lxor";
        - for pairs of value and index (`unisono.pairs`) "minloc", "maxloc": the pair with the best
          value, of equal values the lowest index;
        - `unisono.premul_sum(factor)`: each rank's `x` is multiplied by its own factor first;
        - a function f(a, b) of two arrays like `x` that returns a third, called in Python in the
          order of ranks: associative, need not commute. The slow way: every rank gathers all
          contributions and folds them. An error it raises aborts the group.

        `algorithm`: any of `unisono.algorithms.names("all_reduce")`, or a `Schedule`; None
        chooses.
        """
        if (done := self._quick(_ALL_REDUCE, x, x, op, -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "all_reduce", async_op, custom.in_place, Op.ALL_REDUCE, x, op, -1, algorithm
        )

    def reduce(
        self,
        x: Array,
        root: int = 0,
        op: AnyReduction = "sum",
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces `x` over all ranks, in place on `root`; the others' `x` stays as it is."""
        if (done := self._quick(_REDUCE, x, x, op, root, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "reduce", async_op, custom.in_place, Op.REDUCE, x, op, root, algorithm
        )

    def broadcast(
        self,
        x: Array,
        root: int = 0,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copies `x` of `root` into `x` of all ranks; returns `x`."""
        if (done := self._quick(_BROADCAST, x, x, "sum", root, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "broadcast", async_op, collectives.in_place, Op.BROADCAST, x, "sum", root, algorithm
        )

    def scan(
        self,
        x: Array,
        op: AnyReduction = "sum",
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces `x` over this rank and all ranks below it, in place; returns `x`.

        `op` as for `all_reduce`, except avg.
        """
        if (done := self._quick(_SCAN, x, x, op, -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "scan", async_op, custom.in_place, Op.SCAN, x, op, -1, algorithm
        )

    def exscan(
        self,
        x: Array,
        op: AnyReduction = "sum",
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces `x` over all ranks below this one, in place; returns `x`.

        Rank 0 has none below: its `x` stays as it is. `op` as for `all_reduce`, except avg.
        """
        if (done := self._quick(_EXSCAN, x, x, op, -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "exscan", async_op, custom.in_place, Op.EXSCAN, x, op, -1, algorithm
        )

    def barrier(self, *, async_op: bool = False) -> Any:
        """Returns when all ranks have called it."""
        return self._engine.collective("barrier", async_op, collectives.barrier)

    # ---- collectives from one array to another

    def all_gather(
        self,
        x: Array,
        out: Array | Sequence[Array] | None = None,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers `x` of all ranks on all ranks; returns `out`.

        `out` is one array of size * x.size elements in the order of ranks, or a list of one array
        per rank (which may differ in length); None allocates it with dimension 0 size times as
        long as that of `x`.
        """
        if (done := self._quick(_ALL_GATHER, x, out, "sum", -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "all_gather", async_op, collectives.gathering, Op.ALL_GATHER, x, out, -1, algorithm
        )

    def reduce_scatter(
        self,
        x: Array | Sequence[Array],
        out: Array | None = None,
        op: AnyReduction = "sum",
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces `x` over all ranks and leaves share `rank` of the result in `out`.

        `x` is one array of size * out.size elements, or a list of one array per rank (which may
        differ in length).
        """
        if (done := self._quick(_REDUCE_SCATTER, x, out, op, -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "reduce_scatter", async_op, custom.reduce_scatter, x, out, op, algorithm
        )

    def all_to_all(
        self,
        x: Array | Sequence[Array],
        out: Array | Sequence[Array] | None = None,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends share d of `x` to rank d; share s of `out` comes from rank s. Returns `out`.

        Each of `x` and `out` is one array cut in equal shares, or a list of one array per rank,
        of any lengths that agree between sender and receiver; of lists the ranks first tell each
        other the lengths.
        """
        if (done := self._quick(_ALL_TO_ALL, x, out, "sum", -1, algorithm, async_op)) is not None:
            return done
        listed = isinstance(x, (list, tuple)) or isinstance(out, (list, tuple))
        of = v_collectives.all_to_all_of_lists if listed else collectives.all_to_all
        return self._engine.collective("all_to_all", async_op, of, x, out, algorithm)

    def gather(
        self,
        x: Array,
        out: Array | Sequence[Array] | None = None,
        root: int = 0,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers `x` of all ranks in `out` of `root`; returns `out` there, None elsewhere.

        All `x` have one length; for others there is `gather_v`.
        """
        return self._engine.collective(
            "gather", async_op, collectives.gathering, Op.GATHER, x, out, root, algorithm
        )

    def scatter(
        self,
        x: Array | Sequence[Array] | None,
        out: Array | None = None,
        root: int = 0,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Share r of `x` of `root` goes to `out` of rank r; `x` is None on the other ranks,
        where `out` is required. All shares have one length; for others there is `scatter_v`."""
        return self._engine.collective(
            "scatter", async_op, collectives.scattering, Op.SCATTER, x, out, root, "sum", algorithm
        )

    # ---- the same for pieces of different lengths

    all_gather_v = v_collectives.all_gather_v
    reduce_scatter_v = v_collectives.reduce_scatter_v
    all_to_all_v = v_collectives.all_to_all_v
    gather_v = v_collectives.gather_v
    scatter_v = v_collectives.scatter_v

    # ---- point to point

    send = point_to_point.send
    recv = point_to_point.recv
    sendrecv = point_to_point.sendrecv
    send_init = point_to_point.send_init
    recv_init = point_to_point.recv_init
    probe = point_to_point.probe
    iprobe = point_to_point.iprobe
    neighbor_exchange = point_to_point.neighbor_exchange

    # ---- several calls at once

    def batch(self, *, async_op: bool = False) -> Batch:
        """A `with` block that records the calls of this thread and begins them all at its end.

        Messages may then come in any order on all ranks, and small all_reduces of one type and
        reduction travel as one. The block returns when all calls are complete; with
        `async_op=True` it returns at once, and what `as` names is the `Work` of them all. Inside
        the block calls return what they return outside, but it is filled only afterwards, and a
        call with `async_op=True` returns a `Work` to use afterwards. What one call writes no other
        may touch (`ValueError` where that is seen). All ranks put the same collectives in a batch,
        in one order. If the block raises, nothing of it begins.

        >>> import numpy as np, unisono
        >>> x, y = np.ones(2), np.zeros(2)
        >>> with unisono.init(rank=0, size=1, rendezvous="example of a batch") as comm:
        ...     with comm.batch():
        ...         comm.send(np.full(2, 5.0), dst=0)
        ...         source = comm.recv(y, src=0)
        ...         total = comm.all_reduce(x)
        >>> y.tolist(), total is x
        ([5.0, 5.0], True)
        """
        self._require_open()
        return Batch(self._engine, async_op)

    # ---- groups

    split = groups.split
    group = groups.group
    shrink = shrink.shrink

    # ---- life

    def refuse(self, name: str, error: Exception) -> None:
        """Tells the other ranks that this one does not make its next collective call, `name`,
        because of `error`, which is about to be raised. Ranks that refuse too stay in step with it;
        those that make the call raise `MismatchError` with this reason.

        The collectives do this by themselves. This is for programs that check arguments before.
        """
        self._engine.refuse(name, error)

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends all calls under way, on all ranks, with `AbortedError`."""
        self._group.abort(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leaves the group. Idempotent; the other ranks can finish what does not need this one."""
        self._finalizer()

    def _require_open(self) -> None:
        """For methods that may end without a call. Raises `AbortedError`."""
        if not self._finalizer.alive:
            raise AbortedError("this communicator is closed")

    def __enter__(self) -> Communicator:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    explain = explain.explain
