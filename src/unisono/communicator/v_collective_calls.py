"""Makes the `Call` of each v-collective. If ranks do not know all counts, the call exchanges them
first.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.communicator import collective_calls, python_reductions
from unisono.communicator.arrays import Array
from unisono.communicator.collective_memory import Pieces, stage_many
from unisono.communicator.count_exchange import ExchangedCounts, with_exchanged_counts
from unisono.communicator.engine import Call, DeferredResult, Engine, LaterUse
from unisono.communicator.python_reductions import AnyReduction
from unisono.communicator.row_counts import (
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
    read, written = collective_calls.both_sides(engine, x, out)
    source, target = Pieces.of(read, engine.size), Pieces.of(written, engine.size)
    size_bytes = read[0].dtype.size_bytes

    def counts(side: Pieces) -> list[int]:
        return [nbytes // size_bytes for _, nbytes in side.memory]

    def proceed(sent: Table) -> Call:
        lengths = tuple((sent * size_bytes).ravel().tolist())
        return collective_calls.all_to_all_between(engine, source, target, out, algorithm, lengths)

    element = Rows(count=1, shape=(), nbytes=size_bytes, dtype=read[0].dtype)
    own_counts = ExchangedCounts(
        counts(source),
        counts(target),
        to_send_name="x[{}]" if isinstance(x, (list, tuple)) else "x",
        to_receive_name="out[{}]" if isinstance(out, (list, tuple)) else "out",
    )
    return with_exchanged_counts(
        engine, Op.ALL_TO_ALL, element, -1, algorithm, own_counts, proceed, LaterUse.of(x, out), out
    )


def all_to_all_rows(
    engine: Engine,
    x: Array,
    send_counts: Counts | Sequence[Counts],
    recv_counts: Counts | None,
    buffer: RowBuffer,
    algorithm: str | Schedule | None,
) -> Call:
    have = rows(x, "x")
    table = table_of(send_counts, engine.size)
    to_send = _rows_to_send(engine, send_counts, table)
    require_sum(to_send, have, "send_counts")
    to_receive = None if recv_counts is None else checked(recv_counts, engine.size, "recv_counts")
    if table is not None:
        comes = table[:, engine.rank].tolist()
        if to_receive not in (None, comes):
            raise ValueError(f"recv_counts: expected {comes}, as send_counts say, not {to_receive}")
        to_receive = comes
    if to_receive is None:
        known, capacity = buffer.to_receive(have, engine.size), buffer.capacity(have)
    else:
        buffer.require(have, to_receive)
        known, capacity = to_receive, ANY

    # Memory is checked before the exchange, because a later error ends the group.
    if buffer.out is None:
        read, written = stage_many(x, engine.size, writable=False), None
    else:
        read, written = collective_calls.both_sides(engine, x, buffer.out)

    def proceed(sent: Table) -> Call:
        origin = LengthsFrom.NONE if table is None else LengthsFrom.SEND_COUNTS
        comes = to_receive
        if comes is None:
            comes = sent[:, engine.rank].tolist()
            buffer.require(have, comes)
        out, result = buffer.prepared(x, have, comes)
        places = written or stage_many(out, engine.size, writable=True)
        source = Pieces.consecutive(read, [count * have.nbytes for count in to_send])
        target = Pieces.consecutive(places, [count * have.nbytes for count in comes])
        lengths = tuple((sent * have.nbytes).ravel().tolist())
        return collective_calls.all_to_all_between(
            engine, source, target, result, algorithm, lengths, origin
        )

    if table is not None:
        return proceed(table)
    own_counts = ExchangedCounts(
        to_send,
        known,
        capacity=capacity,
        to_send_name="send_counts[{}]",
        to_receive_name="out[{}]" if recv_counts is None else "recv_counts[{}]",
    )
    later = LaterUse.of(x, buffer.out)
    return with_exchanged_counts(
        engine, Op.ALL_TO_ALL, have, -1, algorithm, own_counts, proceed, later,
        buffer.known_result(),
    )  # fmt: skip


def _rows_to_send(
    engine: Engine, send_counts: Counts | Sequence[Counts], table: Table | None
) -> list[int]:
    """Returns the rows that this rank sends to each rank."""
    if table is None:
        return checked(send_counts, engine.size, "send_counts")
    to_send: list[int] = table[engine.rank].tolist()
    return to_send


def reduce_scattering_rows(
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
    return python_reductions.reduce_scatter(engine, pieces, out, op, algorithm, LengthsFrom.COUNTS)


def scattering_rows(
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
        call = collective_calls.gathering(engine, op, x, targets, root, algorithm, lengths, source)
        return call._replace(result=result)

    if counts is not None:
        shares = checked(counts, n, "counts")
        _require_own_count(shares, engine.rank, have)
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
        LaterUse.of(x, buffer.out if receives else None),
        buffer.known_result() if receives else None,
    )


def _require_own_count(shares: list[int], rank: int, have: Rows) -> None:
    if shares[rank] != have.count:
        raise ValueError(
            f"x: expected {shares[rank]} rows, as counts say for rank {rank}, not {have.count}"
        )


def _source(counts: Counts | None) -> LengthsFrom:
    """Returns the argument that error texts name as the origin of the lengths; NONE if the counts
    were exchanged.
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
    n, listed = engine.size, isinstance(x, (list, tuple))
    have, to_send = _rows_on_root(x, n)

    def with_counts(shares: list[int]) -> Call:
        sources = x if listed or x is None else split(x, shares)
        lengths = tuple(count * have.nbytes for count in shares)
        return collective_calls.scattering(
            engine, Op.SCATTER, sources, out, root, "sum", algorithm, lengths, _source(counts)
        )

    if counts is not None:
        shares = checked(counts, n, "counts")
        _require_shares(shares, have, to_send)
        if out is not None:
            require_share(out, have, shares[root], root)
        return with_counts(shares)
    to_receive = _from_root(root, n, _own_count(out, have, listed))
    own_counts = ExchangedCounts(
        to_send, to_receive, available=ANY if listed else have.count, to_send_name="x[{}]"
    )
    return with_exchanged_counts(
        engine,
        Op.SCATTER,
        have,
        root,
        algorithm,
        own_counts,
        lambda sent: with_counts(sent[root].tolist()),
        LaterUse.of(x, out),
        DeferredResult() if out is None else out,
    )


def _rows_on_root(x: Array | Sequence[Array] | None, ranks: int) -> tuple[Rows, list[int]]:
    """Returns the root's `x` as rows, and the number of rows for each rank: `ANY` (unknown) unless
    `x` is a list.
    """
    if x is None:
        raise ValueError("scatter_v needs x on the root")
    if not isinstance(x, (list, tuple)):
        return rows(x, "x"), [ANY] * ranks
    if len(x) != ranks:
        raise ValueError(f"x: expected one array per rank, {ranks}, not {len(x)}")
    have = rows(x[0], "x[0]")
    return have, [require_alike(x[r], have, f"x[{r}]", "x[0]").count for r in range(ranks)]


def _require_shares(shares: list[int], have: Rows, to_send: list[int]) -> None:
    """Raises `ValueError` unless the root's x has the numbers of rows that `counts` requires."""
    if ANY in to_send:
        require_sum(shares, have, "counts")
    elif shares != to_send:
        raise ValueError(f"x: expected arrays of {shares} rows, as counts say, not {to_send}")


def _own_count(out: Array | None, have: Rows, listed: bool) -> int:
    """Returns the number of rows that the root receives from itself: `ANY` (unknown) if `out` is
    None.
    """
    if out is not None:
        return require_alike(out, have, "out").count
    if not listed:
        raise ValueError("scatter_v of one array needs counts, or out on every rank")
    return ANY


def _from_root(root: int, ranks: int, count: int) -> list[int]:
    """Returns the rows that a rank receives from each rank: `count` from the root, 0 from
    others.
    """
    return [count if rank == root else 0 for rank in range(ranks)]


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
        return collective_calls.scattering(
            engine, Op.SCATTER, None, out, root, "sum", algorithm, lengths, _source(counts)
        )

    if counts is not None:
        shares = checked(counts, n, "counts")
        require_share(out, wants, shares[engine.rank], engine.rank)
        return with_counts(shares)
    to_receive = _from_root(root, n, wants.count)
    return with_exchanged_counts(
        engine,
        Op.SCATTER,
        wants,
        root,
        algorithm,
        ExchangedCounts([0] * n, to_receive),
        lambda sent: with_counts(sent[root].tolist()),
        LaterUse.of(None, out),
        out,
    )
