"""How each collective finds its memory, checks it, and runs: the half behind `Communicator`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from unisono.communicator.arrays import (
    Array,
    Located,
    Staged,
    assign,
    duplicate,
    empty,
    overlap,
    stage,
    stage_pieces,
    widened,
)
from unisono.communicator.calls import Request, parse_reduction
from unisono.communicator.engine import Engine, Memory
from unisono.communicator.premul import PremulSum, scale
from unisono.errors import MismatchError
from unisono.schedule import Schedule
from unisono.types import DType, Op, ReduceOp

Reduction: TypeAlias = str | ReduceOp | PremulSum
Change: TypeAlias = Callable[[Array], None]


def barrier(engine: Engine, *, async_op: bool) -> Any:
    """All ranks meet."""
    call = engine.book.call(Request(Op.BARRIER, (), DType.UINT8))
    return engine.run(call, [], [], None, keep=None, async_op=async_op)


def in_place(
    engine: Engine,
    op: Op,
    x: Array,
    reduction: Reduction,
    root: int,
    algorithm: str | Schedule | None,
    async_op: bool,
) -> Any:
    """all_reduce, reduce, broadcast, scan, exscan: one array that is input and output."""
    receives = _receives(op, engine.rank, root)
    staged = stage(x, writable=receives)
    memory, complete = staged, staged.restore if receives else None
    request = _request(engine, op, staged, staged.located[1:2], reduction, root, algorithm)
    engine.book.check(request)
    change = _change_of(engine, reduction, request)
    own = None  # what takes the place of x
    if engine.book.widens(request):
        # In float32, so that the result is rounded once whatever the algorithm.
        own = widened(x)
        request = _wide(request)
        if receives:
            complete = _assigning(x, own)
    elif change is not None and not receives:
        own = duplicate(x)
    if own is not None:
        memory = stage(own, writable=True)
    call = engine.book.call(request)
    if change is not None:
        change(memory.array if memory.copy is None else memory.copy)
    elif request.caller_dtype is None:
        engine.remember_quick(op, staged, staged, reduction, root, algorithm, call)
    where = [memory.located[:2]]
    return engine.run(
        call, where, where, x, keep=(staged, memory), async_op=async_op, complete=complete
    )


def _receives(op: Op, rank: int, root: int) -> bool:
    """Whether the operation in place changes the rank's array."""
    if op is Op.EXSCAN:
        return rank > 0
    return not op.rooted or (rank == root) is (op is Op.REDUCE)


def gathering(
    engine: Engine,
    op: Op,
    x: Array,
    out: Array | Sequence[Array] | None,
    root: int,
    algorithm: str | Schedule | None,
    async_op: bool,
) -> Any:
    """all_gather and gather: one piece in, one piece per rank out."""
    source = stage(x, writable=False)
    if op is Op.GATHER and engine.rank != root:
        lengths = (source.located[1],) * engine.size
        call = engine.book.call(_request(engine, op, source, lengths, "sum", root, algorithm))
        where = [source.located[:2]]  # the output is not touched here
        return engine.run(call, where, where, None, keep=source, async_op=async_op)
    if out is None:
        first = x.shape[0] if len(x.shape) else 1
        out = empty(x, (first * engine.size, *x.shape[1:]))
    targets = _stage_many(out, engine.size, writable=True)
    needed = source.count * engine.size
    if len(targets) == 1 and targets[0].count != needed:
        raise ValueError(f"{op}: out has {_text(targets[0])}, but needs {needed}")
    lengths = _lengths(targets, engine.size, "out")
    if source.dtype is not targets[0].dtype or source.located[1] != lengths[engine.rank]:
        raise ValueError(
            f"{op}: x has {_text(source)}, but its place in out has "
            f"{_text(targets[0], lengths[engine.rank])}"
        )
    call = engine.book.call(_request(engine, op, source, lengths, "sum", root, algorithm))
    where = _memory(targets, engine.size)
    if source.located[0] != where[engine.rank][0]:
        source = _apart([source], targets)[0]
    if len(targets) == 1:
        engine.remember_quick(op, source, targets[0], "sum", root, algorithm, call)
    return engine.run(
        call,
        [source.located[:2]],
        where,
        out,
        keep=(source, targets),
        async_op=async_op,
        complete=_restoring(targets),
    )


def scattering(
    engine: Engine,
    op: Op,
    x: Array | Sequence[Array] | None,
    out: Array | None,
    root: int,
    reduction: Reduction,
    algorithm: str | Schedule | None,
    async_op: bool,
) -> Any:
    """reduce_scatter and scatter: one piece per rank in, one piece out."""
    if op is Op.SCATTER and engine.rank != root:
        if out is None:
            raise ValueError("scatter needs out on every rank but the root")
        target = stage(out, writable=True)
        lengths = (target.located[1],) * engine.size
        call = engine.book.call(_request(engine, op, target, lengths, "sum", root, algorithm))
        where = [target.located[:2]]
        return engine.run(
            call, where, where, out, keep=target, async_op=async_op, complete=target.restore
        )
    if x is None:
        raise ValueError(f"{op} needs x on this rank")
    sources = _stage_many(x, engine.size, writable=False)
    lengths = _lengths(sources, engine.size, "x")
    if out is None:
        out = share_of(x, engine.size, engine.rank)
    target = stage(out, writable=True)
    if sources[0].dtype is not target.dtype or target.located[1] != lengths[engine.rank]:
        raise ValueError(
            f"{op}: out has {_text(target)}, but the share of rank {engine.rank} is "
            f"{_text(sources[0], lengths[engine.rank])}"
        )
    request = _request(engine, op, target, lengths, reduction, root, algorithm)
    engine.book.check(request)
    change = _change_of(engine, reduction, request)
    if engine.book.widens(request):
        return _scatter_wide(engine, request, sources, target, out, change, async_op)
    call = engine.book.call(request)
    if change is not None:
        sources = [_changed(duplicate(source.array), change) for source in sources]
    elif _memory(sources, engine.size)[engine.rank][0] != target.located[0]:
        sources = _apart(sources, [target])
    if len(sources) == 1 and change is None:
        engine.remember_quick(op, sources[0], target, reduction, root, algorithm, call)
    return engine.run(
        call,
        _memory(sources, engine.size),
        [target.located[:2]],
        out,
        keep=(sources, target),
        async_op=async_op,
        complete=target.restore,
    )


def _scatter_wide(
    engine: Engine,
    request: Request,
    sources: list[Staged],
    target: Staged,
    out: Array,
    change: Change | None,
    async_op: bool,
) -> Any:
    """In float32, so that the result is rounded once whatever the algorithm."""
    wide_sources = [_changed(widened(source.array), change) for source in sources]
    wide_out = empty(wide_sources[0].array, (target.count,))
    wide_target = stage(wide_out, writable=True)

    def complete() -> None:
        assign(out, wide_out.reshape(tuple(out.shape)))

    return engine.run(
        engine.book.call(_wide(request)),
        _memory(wide_sources, engine.size),
        [wide_target.located[:2]],
        out,
        keep=(wide_sources, wide_target),
        async_op=async_op,
        complete=complete,
    )


def all_to_all(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | Sequence[Array] | None,
    algorithm: str | Schedule | None,
    async_op: bool,
) -> Any:
    """One piece per rank in and out."""
    sources = _stage_many(x, engine.size, writable=False)
    if out is None:
        if isinstance(x, (list, tuple)):
            raise ValueError("all_to_all needs out where x is a list: its lengths are the peers'")
        out = empty(x, tuple(x.shape))  # type: ignore[union-attr]
    targets = _stage_many(out, engine.size, writable=True)
    if sources[0].dtype is not targets[0].dtype:
        raise ValueError(f"all_to_all: x has {_text(sources[0])}, out {_text(targets[0])}")
    sources = _apart(sources, targets)
    if isinstance(x, (list, tuple)) or isinstance(out, (list, tuple)):
        lengths = _agree_on_lengths(engine, sources, targets)
    else:
        lengths = _lengths(sources, engine.size, "x")
        if targets[0].located[1] != sources[0].located[1]:
            raise ValueError(f"all_to_all: x has {_text(sources[0])}, out {_text(targets[0])}")
    call = engine.book.call(
        _request(engine, Op.ALL_TO_ALL, sources[0], lengths, "sum", -1, algorithm)
    )
    if len(sources) == 1 and len(targets) == 1:
        engine.remember_quick(Op.ALL_TO_ALL, sources[0], targets[0], "sum", -1, algorithm, call)
    return engine.run(
        call,
        _memory(sources, engine.size),
        _memory(targets, engine.size),
        out,
        keep=(sources, targets),
        async_op=async_op,
        complete=_restoring(targets),
    )


def _agree_on_lengths(
    engine: Engine, sources: list[Staged], targets: list[Staged]
) -> tuple[int, ...]:
    """Bytes from each rank to each: the ranks tell each other, since nobody knows them all."""
    size = engine.size
    sent = [length for _, length in _memory(sources, size)]
    wanted = [length for _, length in _memory(targets, size)]
    mine = np.array([[int(sources[0].dtype)] * size, sent, wanted], np.int64)
    table = gathering(engine, Op.ALL_GATHER, mine, None, -1, None, False).reshape(size, 3, size)
    kinds = [DType(int(kind)).name.lower() for kind in table[:, 0, 0]]
    for src, dst in np.ndindex(size, size):
        if kinds[src] != kinds[dst] or table[src, 1, dst] != table[dst, 2, src]:
            text = (
                f"all_to_all: rank {src} sends {table[src, 1, dst]} bytes of {kinds[src]} to "
                f"rank {dst}, which receives {table[dst, 2, src]} bytes of {kinds[dst]}"
            )
            engine.group.fail_mismatch(text)
            raise MismatchError(text)
    lengths = tuple(int(length) for length in table[:, 1, :].ravel())
    # Equal ones are an ordinary call, which needs no list of them.
    return lengths if len(set(lengths)) > 1 else lengths[:size]


# ---- small helpers


def _request(
    engine: Engine,
    op: Op,
    staged: Staged,
    lengths: tuple[int, ...],
    reduction: Reduction,
    root: int,
    algorithm: str | Schedule | None,
) -> Request:
    name = engine.book.name(algorithm)
    return Request(op, lengths, staged.dtype, parse_reduction(reduction), root, name)


def _change_of(engine: Engine, reduction: Reduction, request: Request) -> Change | None:
    """What happens to this rank's own contribution before anybody reads it, in place."""
    if isinstance(reduction, PremulSum):
        return functools.partial(scale, factor=reduction.factor)
    # Elsewhere the reduction sees to it; here some result is one contribution as it came.
    if request.reduction.is_logical and (engine.size == 1 or request.op.scans):
        return lambda array: assign(array, array != 0)
    return None


def _changed(array: Array, change: Change | None) -> Staged:
    staged = stage(array, writable=True)
    if change is not None:
        change(array if staged.copy is None else staged.copy)
    return staged


def _wide(request: Request) -> Request:
    """The same request for float32 copies of the elements."""
    factor = DType.FLOAT32.size_bytes // request.dtype.size_bytes
    lengths = tuple(length * factor for length in request.lengths)
    return request._replace(lengths=lengths, dtype=DType.FLOAT32, caller_dtype=request.dtype)


def _stage_many(x: Array | Sequence[Array], ranks: int, *, writable: bool) -> list[Staged]:
    """One staged array to be cut in shares, or one per rank."""
    if isinstance(x, (list, tuple)):
        return stage_pieces(x, ranks, writable=writable, what="out" if writable else "x")
    return [stage(x, writable=writable)]


def _memory(staged: list[Staged], ranks: int) -> Memory:
    if len(staged) == 1:
        return _shares(staged[0].located, ranks)
    return [piece.located[:2] for piece in staged]


def _shares(located: Located, ranks: int) -> Memory:
    share = located[1] // ranks
    return [(located[0] + r * share, share) for r in range(ranks)]


def _lengths(staged: list[Staged], ranks: int, name: str) -> tuple[int, ...]:
    if len(staged) == 1 and staged[0].count % ranks:
        raise ValueError(f"{name} has {_text(staged[0])}: no equal shares for {ranks} ranks")
    return tuple(length for _, length in _memory(staged, ranks))


def share_of(x: Array | Sequence[Array], ranks: int, rank: int) -> Array:
    """An empty array for the share of a rank."""
    if isinstance(x, (list, tuple)):
        return empty(x[rank], tuple(x[rank].shape))
    shape = tuple(x.shape)  # type: ignore[union-attr]
    if shape and shape[0] % ranks == 0:
        return empty(x, (shape[0] // ranks, *shape[1:]))
    return empty(x, (int(np.prod(shape)) // ranks,))


def _apart(sources: list[Staged], targets: list[Staged]) -> list[Staged]:
    """Copies of sources that the results would overwrite before they are sent."""
    if not any(overlap(s.located, t.located) for s in sources for t in targets):
        return sources
    return [stage(duplicate(source.array), writable=False) for source in sources]


def _assigning(target: Array, value: Array) -> Callable[[], None]:
    return lambda: assign(target, value)


def _restoring(targets: list[Staged]) -> Callable[[], None]:
    def restore() -> None:
        for target in targets:
            target.restore()

    return restore


def _text(staged: Staged, nbytes: int | None = None) -> str:
    count = staged.count if nbytes is None else nbytes // staged.dtype.size_bytes
    return f"{count} elements of {staged.dtype.name.lower()}"
