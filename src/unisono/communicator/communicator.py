"""The communicator: a rank's access to its group, with all collectives as methods."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from unisono import config
from unisono.bootstrap import GroupConfig, JoinedGroup, join_group
from unisono.communicator import (
    c_interface,
    collective_calls,
    communicator_stats,
    explain,
    groups,
    in_place_collectives,
    point_to_point,
    python_reductions,
    shared_arrays,
    shrink,
    v_collective_calls,
    v_collectives,
    windows,
)
from unisono.communicator.arguments import check_timeout
from unisono.communicator.arrays import Array
from unisono.communicator.batch import Batch
from unisono.communicator.engine import Engine
from unisono.communicator.python_reductions import AnyReduction
from unisono.errors import AbortedError
from unisono.execution import OP_CODES
from unisono.schedule import Schedule
from unisono.selection import SelectionTable
from unisono.timeline import SharedTimeline, TimelineWriter
from unisono.types import Op

_REDUCE_SCATTER = OP_CODES[Op.REDUCE_SCATTER]
_ALL_GATHER = OP_CODES[Op.ALL_GATHER]
_ALL_TO_ALL = OP_CODES[Op.ALL_TO_ALL]


class Communicator:
    """A rank's access to a group of ranks, with all collectives as methods.

    **Arrays** are NumPy arrays or CPU torch tensors of any strides. An array whose elements share
    memory, as after `expand`, can be input but not output: pass a contiguous copy instead.

    **Order.** All ranks must call the same collectives in the same order with matching arguments.
    Several threads may call methods, but the program must keep this order.

    **Errors.** A call that does not match raises `MismatchError` on all ranks. A rank with wrong
    arguments raises `ValueError`, `TypeError` or `UnsupportedError`; ranks with right arguments
    then raise `MismatchError` with the same reason. If all ranks have wrong arguments, the
    communicator stays usable. After any `CommunicationError` the communicator refuses further work
    with the same cause.

    **Asynchronous calls.** With `async_op=True` a method returns a `Work` at once. The program must
    not touch the arrays until `Work.wait` has returned.

    **Algorithms.** `algorithm` is a name of `unisono.algorithms.names(...)`, or a `Schedule` for
    this operation, group and root. The library proves a schedule on first use. A wrong schedule
    raises `ScheduleError`, an unsuitable algorithm `UnsupportedError`.

    **Reproducibility.** If `reproducible` is True, every reduction is one fold in rank order, ((x0
    + x1) + x2) + ... So the bits of an element depend only on its contributions and their ranks. An
    `algorithm` with another order raises `UnsupportedError`.
    """

    def __init__(
        self,
        group_config: GroupConfig,
        settings: config.Settings,
        *,
        joined: JoinedGroup | None = None,
    ) -> None:
        joined = joined or join_group(group_config, settings)
        self.rank = group_config.rank
        self.size = group_config.size
        self.former_ranks: tuple[int, ...] = ()
        """Old rank of each rank, in the communicator that `shrink` replaced; empty without a
        `shrink`.
        """
        self._settings = settings
        self._group = joined.group
        self._network = joined.network
        self._engine = Engine(
            joined.group,
            self.rank,
            self.size,
            settings,
            SelectionTable.unpack(joined.rank0_data),
            joined.network,
            single_copy=joined.single_copy,
        )
        self._quick = self._engine.quick
        self._messages = self._engine.messages
        self._name = joined.nonce.hex()
        job = hashlib.sha256(joined.nonce).hexdigest()[:16]
        self._timeline = SharedTimeline(rank=self.rank, size=self.size, job=job)
        self._group_calls: Counter[tuple[int, ...]] = Counter()
        # The finalizer also runs when the interpreter ends, so that the other ranks detect a
        # departure instead of a lost rank.
        self._finalizer = weakref.finalize(self, joined.close)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size})"

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call fails; the program may set it at any time."""
        return self._engine.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._engine.timeout_s = check_timeout(timeout_s)

    @property
    def timeline(self) -> TimelineWriter:
        """The record of this rank's most recent events, which all communicators of the same world
        share.
        """
        return self._timeline.open()

    @property
    def reproducible(self) -> bool:
        """True if every reduction is a fold in rank order."""
        return self._settings.reproducible

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return self._engine.call_cache.hosts

    # ---- arrays that other ranks read in place

    empty = shared_arrays.empty
    empty_like = shared_arrays.empty_like
    window = windows.window

    @property
    def shares_memory(self) -> bool:
        """True if all ranks are on one host and `empty` returns shared arrays."""
        return len(self.hosts) == 1 and self._engine.group.heap_bytes > 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's arrays of `empty` that are not yet freed. The length of each is
        rounded up: to a cache line, from 4 KiB to a page, from 2 MiB to 2 MiB.
        """
        return self._engine.group.used_heap_bytes

    # ---- collectives in place

    all_reduce = in_place_collectives.all_reduce
    reduce = in_place_collectives.reduce
    broadcast = in_place_collectives.broadcast
    scan = in_place_collectives.scan
    exscan = in_place_collectives.exscan

    def barrier(self, *, async_op: bool = False) -> Any:
        """Waits until all ranks have called `barrier`."""
        return self._engine.collective("barrier", async_op, collective_calls.barrier)

    # ---- collectives from one array to another

    def all_gather(
        self,
        x: Array,
        out: Array | Sequence[Array] | None = None,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers `x` of all ranks on all ranks. Returns `out`.

        `out` is one array of size * x.size elements in rank order, or a list of one array per rank.
        The arrays of a list may differ in length. None allocates an array like `x` whose dimension
        0 is size times as long.
        """
        if (done := self._quick(_ALL_GATHER, x, out, "sum", -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "all_gather", async_op, collective_calls.gathering, Op.ALL_GATHER, x, out, -1, algorithm
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
        """Reduces `x` over all ranks and writes this rank's share of the result to `out`.

        `x` is one array of size * out.size elements, or a list of one array per rank. The arrays of
        a list may differ in length.
        """
        if (done := self._quick(_REDUCE_SCATTER, x, out, op, -1, algorithm, async_op)) is not None:
            return done
        return self._engine.collective(
            "reduce_scatter", async_op, python_reductions.reduce_scatter, x, out, op, algorithm
        )

    def all_to_all(
        self,
        x: Array | Sequence[Array],
        out: Array | Sequence[Array] | None = None,
        *,
        algorithm: str | Schedule | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends share d of `x` to rank d. Share s of `out` comes from rank s. Returns `out`.

        `x` and `out` are each one array of equal shares, or a list of one array per rank. The
        arrays of a list may have any length that sender and receiver agree on. If `x` or `out` is a
        list, the ranks first exchange the lengths.
        """
        if (done := self._quick(_ALL_TO_ALL, x, out, "sum", -1, algorithm, async_op)) is not None:
            return done
        listed = isinstance(x, (list, tuple)) or isinstance(out, (list, tuple))
        of = v_collective_calls.all_to_all_of_lists if listed else collective_calls.all_to_all
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
        """Gathers `x` of all ranks in `out` of `root`. Returns `out` on `root`, None on other
        ranks.

        All `x` must have one length; use `gather_v` for different lengths.
        """
        return self._engine.collective(
            "gather", async_op, collective_calls.gathering, Op.GATHER, x, out, root, algorithm
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
        """Sends share r of `x` of `root` to `out` of rank r. Returns `out`.

        On other ranks `x` is None and `out` is required. All shares must have one length; use
        `scatter_v` for different lengths.
        """
        return self._engine.collective(
            "scatter",
            async_op,
            collective_calls.scattering,
            Op.SCATTER,
            x,
            out,
            root,
            "sum",
            algorithm,
        )

    # ---- collectives with pieces of different lengths

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

    # ---- batches of calls

    def batch(self, *, async_op: bool = False) -> Batch:
        """Returns a `with` block that records this thread's calls and begins them all at its end.

        Ranks may record messages in any order. Small all_reduces of one type and reduction are
        packed into one.

        The block waits until all calls are complete. With `async_op=True` it does not wait, and the
        variable after `as` is the `Work` of all calls.

        Inside the block, calls return their usual result, but its content arrives only after the
        block. A call with `async_op=True` returns a `Work` for use after the block.

        No call may use memory that another call of the batch writes; detected cases raise
        `ValueError`. All ranks must record the same collectives in the same order. If the block
        raises, no call of it begins.

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

    # ---- refusal, abort and close

    def refuse(self, name: str, error: Exception) -> None:
        """Tells the other ranks that this rank raises an error instead of making its next
        collective call, `name`.

        The program is about to raise `error`, which is the reason. Ranks that refuse the same call
        stay in step with this rank. Ranks that make the call raise `MismatchError` with this
        reason.

        The collectives report their own refusals. This method serves programs that check arguments
        before the call.
        """
        self._engine.refuse(name, error)

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends all pending calls on all ranks with `AbortedError`."""
        self._group.abort(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leaves the group; a second call does nothing. Calls of other ranks that do not need this
        rank can finish.
        """
        self._finalizer()
        self._engine.release_ended()

    def _require_open(self) -> None:
        """Raises `AbortedError` if the communicator is closed. Only methods that begin no native
        call need this check, since native calls make it themselves.
        """
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

    c_interface = c_interface.c_interface
    explain = explain.explain
    stats = communicator_stats.stats
