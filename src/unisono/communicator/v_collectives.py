"""V-collectives: collectives whose pieces differ in length from rank to rank.

Lengths are counted in rows of the leading dimension; the rows of a one-dimensional array are its
elements. Counts that all ranks know are part of the fingerprint that the ranks compare anyway, so
no extra exchange is needed. Otherwise the ranks exchange the counts within the same call.

Functions with a `self` are methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.communicator import collectives, custom
from unisono.communicator.arrays import Array, Staged
from unisono.communicator.count_exchange import ExchangedCounts, with_exchanged_counts
from unisono.communicator.custom import AnyReduction
from unisono.communicator.engine import Call, DeferredResult, Engine
from unisono.communicator.rows import (
    ANY,
    Counts,
    RowBuffer,
    Rows,
    Table,
    checked,
    require_alike,
    require_share,
    require_sum,
    rows,
    split,
    table_of,
)
from unisono.schedule import Schedule
from unisono.types import LengthsFrom, Op

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

# ---- the methods


def all_gather_v(
    self: Communicator,
    x: Array,
    counts: Counts | None = None,
    out: Array | Sequence[Array] | None = None,
    *,
    pieces: bool = False,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Gathers `x` of all ranks on all ranks; the number of rows may differ from rank to rank.

    `counts` are the rows of each rank, given by all ranks or by none. Without `counts` the ranks
    exchange them first. `out` fits exactly these rows, or is a list of one array per rank; None
    allocates it. Returns `out`, the rows in rank order; with `pieces=True` a list of one view of it
    per rank. A rank without data gives an array of no rows.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of all_gather_v") as comm:
    ...     comm.all_gather_v(np.arange(3), pieces=True)
    [array([0, 1, 2])]
    """
    return self._engine.collective(
        "all_gather_v",
        async_op,
        gathering_rows,
        Op.ALL_GATHER,
        x,
        counts,
        -1,
        RowBuffer(out, pieces),
        algorithm,
    )


def gather_v(
    self: Communicator,
    x: Array,
    counts: Counts | None = None,
    root: int = 0,
    out: Array | Sequence[Array] | None = None,
    *,
    pieces: bool = False,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Gathers like `all_gather_v`, but on `root` only. Other ranks ignore `out` and return None."""
    return self._engine.collective(
        "gather_v",
        async_op,
        gathering_rows,
        Op.GATHER,
        x,
        counts,
        root,
        RowBuffer(out, pieces),
        algorithm,
    )


def scatter_v(
    self: Communicator,
    x: Array | Sequence[Array] | None,
    counts: Counts | None = None,
    root: int = 0,
    out: Array | None = None,
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Sends the first `counts[0]` rows of `x` of `root` to rank 0, the next `counts[1]` to rank 1,
    etc.

    `x` is one array or a list of one array per rank. On other ranks `x` is None and `out` is
    required. `counts` are the rows of each rank, given by all ranks or by none. Without `counts`, a
    rank's number of rows is that of its `out` and of its array in the root's list; the two must
    agree. Returns `out`.
    """
    return self._engine.collective("scatter_v", async_op, _scatter, x, counts, root, out, algorithm)


def reduce_scatter_v(
    self: Communicator,
    x: Array,
    counts: Counts,
    out: Array | None = None,
    op: AnyReduction = "sum",
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces `x` over all ranks. Rank r gets the next `counts[r]` rows of the result, in rank
    order.

    `counts` must be equal on all ranks and add up to the rows of `x`. Returns `out`; None allocates
    it.
    """
    return self._engine.collective(
        "reduce_scatter_v", async_op, _reduce_scatter, x, counts, out, op, algorithm
    )


def all_to_all_v(
    self: Communicator,
    x: Array,
    send_counts: Counts | Sequence[Counts],
    recv_counts: Counts | None = None,
    out: Array | Sequence[Array] | None = None,
    *,
    pieces: bool = False,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Sends the first `send_counts[0]` rows of `x` to rank 0, the next `send_counts[1]` to rank 1,
    etc.

    The ranks first exchange their counts. If a rank gives `recv_counts` that do not agree, all
    ranks raise `MismatchError`. No exchange is needed if `send_counts` is a table, equal on all
    ranks, whose row s has the counts of rank s. `out` fits exactly the arriving rows, or is a list
    of one array per rank; None allocates it. Returns `out`, the rows in rank order; with
    `pieces=True` a list of one view of it per rank.
    """
    return self._engine.collective(
        "all_to_all_v",
        async_op,
        _all_to_all,
        x,
        send_counts,
        recv_counts,
        RowBuffer(out, pieces),
        algorithm,
    )


def all_to_all_of_lists(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | Sequence[Array] | None,
    algorithm: str | Schedule | None,
) -> Call:
    """Makes an all_to_all in which `x` or `out` is a list of arrays of any lengths."""
    if out is None:
        raise ValueError(
            "all_to_all needs out if x is a list, since its lengths depend on the peers"
        )
    sources, targets = collectives.both_sides(engine, x, out)
    size_bytes = sources[0].dtype.size_bytes

    def counts(side: list[Staged]) -> list[int]:
        return [nbytes // size_bytes for _, nbytes in collectives.memory_of(side, engine.size)]

    def proceed(sent: Table) -> Call:
        lengths = tuple((sent * size_bytes).ravel().tolist())
        return collectives.all_to_all_between(engine, sources, targets, out, algorithm, lengths)

    element = Rows(count=1, shape=(), nbytes=size_bytes, dtype=sources[0].dtype)
    own_counts = ExchangedCounts(
        counts(sources),
        counts(targets),
        to_send_name="x[{}]" if isinstance(x, (list, tuple)) else "x",
        to_receive_name="out[{}]" if isinstance(out, (list, tuple)) else "out",
    )
    return with_exchanged_counts(
        engine, Op.ALL_TO_ALL, element, -1, algorithm, own_counts, proceed, out
    )


# ---- the same, prepared


def _all_to_all(
    engine: Engine,
    x: Array,
    send_counts: Counts | Sequence[Counts],
    recv_counts: Counts | None,
    buffer: RowBuffer,
    algorithm: str | Schedule | None,
) -> Call:
    have = rows(x, "x")
    table = table_of(send_counts, engine.size)
    to_send = (
        checked(send_counts, engine.size, "send_counts")
        if table is None
        else table[engine.rank].tolist()
    )
    require_sum(to_send, have, "send_counts")
    to_receive = None
    if recv_counts is not None:
        to_receive = checked(recv_counts, engine.size, "recv_counts")
        buffer.require(have, to_receive)

    def proceed(sent: Table) -> Call:
        source = LengthsFrom.NONE if table is None else LengthsFrom.SEND_COUNTS
        comes = sent[:, engine.rank].tolist()
        if to_receive not in (None, comes):
            raise ValueError(f"recv_counts: expected {comes}, as send_counts say, not {to_receive}")
        targets, result = buffer.arrays(x, have, comes)
        lengths = tuple((sent * have.nbytes).ravel().tolist())
        call = collectives.all_to_all(
            engine, split(x, to_send), targets, algorithm, lengths, source
        )
        return call._replace(result=result)

    if table is not None:
        return proceed(table)
    own_counts = ExchangedCounts(
        to_send,
        to_receive or buffer.to_receive(have, engine.size),
        capacity=buffer.capacity(have),
        to_send_name="send_counts[{}]",
        to_receive_name="recv_counts[{}]" if to_receive else "out[{}]",
    )
    return with_exchanged_counts(
        engine, Op.ALL_TO_ALL, have, -1, algorithm, own_counts, proceed, buffer.known_result()
    )


def _reduce_scatter(
    engine: Engine,
    x: Array,
    counts: Counts,
    out: Array | None,
    op: AnyReduction,
    algorithm: str | Schedule | None,
) -> Call:
    shares = checked(counts, engine.size, "counts")
    have = rows(x, "x")
    require_sum(shares, have, "counts")
    if out is not None:
        require_share(out, have, shares[engine.rank], engine.rank)
    pieces = split(x, shares)
    return custom.reduce_scatter(engine, pieces, out, op, algorithm, LengthsFrom.COUNTS)


def _scatter(
    engine: Engine,
    x: Array | Sequence[Array] | None,
    counts: Counts | None,
    root: int,
    out: Array | None,
    algorithm: str | Schedule | None,
) -> Call:
    engine.call_cache.check_root(Op.SCATTER, root)
    if engine.rank == root:
        return _scattering_on_root(engine, x, counts, root, out, algorithm)
    return _scattering_off_root(engine, counts, root, out, algorithm)


def gathering_rows(
    engine: Engine,
    op: Op,
    x: Array,
    counts: Counts | None,
    root: int,
    buffer: RowBuffer,
    algorithm: str | Schedule | None,
) -> Call:
    have, n = rows(x, "x"), engine.size
    engine.call_cache.check_root(op, root)
    receives = op is Op.ALL_GATHER or engine.rank == root
    source = _source(counts)

    def with_counts(shares: list[int]) -> Call:
        lengths = tuple(count * have.nbytes for count in shares)
        targets, result = buffer.arrays(x, have, shares) if receives else (None, None)
        call = collectives.gathering(engine, op, x, targets, root, algorithm, lengths, source)
        return call._replace(result=result)

    if counts is not None:
        shares = checked(counts, n, "counts")
        if shares[engine.rank] != have.count:
            raise ValueError(
                f"x: expected {shares[engine.rank]} rows, as counts say for rank {engine.rank}, "
                f"not {have.count}"
            )
        return with_counts(shares)
    own_counts = ExchangedCounts(
        [have.count if op is Op.ALL_GATHER or rank == root else 0 for rank in range(n)],
        buffer.to_receive(have, n) if receives else [0] * n,
        capacity=buffer.capacity(have) if receives else 0,
        to_receive_name="out[{}]",
    )
    return with_exchanged_counts(
        engine,
        op,
        have,
        root,
        algorithm,
        own_counts,
        lambda sent: with_counts(sent[:, max(root, 0)].tolist()),
        buffer.known_result() if receives else None,
    )


def _source(counts: Counts | None) -> LengthsFrom:
    """Returns the argument that errors name if lengths differ; exchanged counts come from no
    argument.
    """
    return LengthsFrom.NONE if counts is None else LengthsFrom.COUNTS


def _scattering_on_root(
    engine: Engine,
    x: Array | Sequence[Array] | None,
    counts: Counts | None,
    root: int,
    out: Array | None,
    algorithm: str | Schedule | None,
) -> Call:
    """Makes a scatter_v on the root."""
    n = engine.size
    if x is None:
        raise ValueError("scatter_v needs x on the root")
    listed = isinstance(x, (list, tuple))
    if listed and len(x) != n:
        raise ValueError(f"x: expected one array per rank, {n}, not {len(x)}")
    have = rows(x[0], "x[0]") if listed else rows(x, "x")

    def with_counts(shares: list[int]) -> Call:
        sources = x if listed else split(x, shares)
        lengths = tuple(count * have.nbytes for count in shares)
        return collectives.scattering(
            engine, Op.SCATTER, sources, out, root, "sum", algorithm, lengths, _source(counts)
        )

    to_send = [ANY] * n
    if listed:
        to_send = [require_alike(x[r], have, f"x[{r}]", "x[0]").count for r in range(n)]
    if counts is not None:
        shares = checked(counts, n, "counts")
        if listed and shares != to_send:
            raise ValueError(f"x: expected arrays of {shares} rows, as counts say, not {to_send}")
        if not listed:
            require_sum(shares, have, "counts")
        if out is not None:
            require_share(out, have, shares[root], root)
        return with_counts(shares)
    if out is None and not listed:
        raise ValueError("scatter_v of one array needs counts, or out on every rank")
    to_receive = [0] * n
    to_receive[root] = ANY if out is None else require_alike(out, have, "out").count
    own_counts = ExchangedCounts(
        to_send, to_receive, available=ANY if listed else have.count, to_send_name="x[{}]"
    )
    known_result = DeferredResult() if out is None else out
    return with_exchanged_counts(
        engine,
        Op.SCATTER,
        have,
        root,
        algorithm,
        own_counts,
        lambda sent: with_counts(sent[root].tolist()),
        known_result,
    )


def _scattering_off_root(
    engine: Engine,
    counts: Counts | None,
    root: int,
    out: Array | None,
    algorithm: str | Schedule | None,
) -> Call:
    """Makes a scatter_v on a rank that is not the root."""
    n = engine.size
    if out is None:
        raise ValueError("scatter_v needs out on every rank but the root")
    wants = rows(out, "out")

    def with_counts(shares: list[int]) -> Call:
        lengths = tuple(count * wants.nbytes for count in shares)
        return collectives.scattering(
            engine, Op.SCATTER, None, out, root, "sum", algorithm, lengths, _source(counts)
        )

    if counts is not None:
        shares = checked(counts, n, "counts")
        require_share(out, wants, shares[engine.rank], engine.rank)
        return with_counts(shares)
    to_receive = [wants.count if rank == root else 0 for rank in range(n)]
    return with_exchanged_counts(
        engine,
        Op.SCATTER,
        wants,
        root,
        algorithm,
        ExchangedCounts([0] * n, to_receive),
        lambda sent: with_counts(sent[root].tolist()),
        out,
    )
