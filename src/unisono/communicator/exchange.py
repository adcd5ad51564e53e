"""How each collective finds its memory, checks it, and runs: the half behind `Communicator`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono import native
from unisono.communicator.arrays import (
    Array,
    Located,
    Staged,
    assign,
    empty,
    overlap,
    stage,
    stage_pieces,
    widened,
)
from unisono.communicator.calls import parse_reduction
from unisono.communicator.engine import Engine, Memory
from unisono.communicator.work import FinishedWork
from unisono.errors import MismatchError
from unisono.types import DType, Op, ReduceOp


def barrier(engine: Engine, *, async_op: bool) -> Any:
    """All ranks meet."""
    key = (Op.BARRIER, 0, int(DType.UINT8), ReduceOp.SUM, -1, None)
    call = engine.book.find(key)
    if call is None:
        call = engine.book.prepare(key, engine.book.choose(Op.BARRIER, 0, -1, None).plan)
    return engine.run(call, [], [], None, keep=None, async_op=async_op)


def in_place(
    engine: Engine,
    op: Op,
    x: Array,
    reduction: str | ReduceOp,
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """all_reduce, reduce, broadcast: one array that is input and output."""
    as_written, reduction = reduction, parse_reduction(reduction)
    staged = stage(x, writable=op is Op.ALL_REDUCE or (engine.rank == root) is (op is Op.REDUCE))
    address, nbytes, dtype = staged.located
    key = (op, nbytes, dtype, reduction, root, algorithm)
    call = engine.book.find(key)
    if call is None:
        engine.book.check(op, staged.dtype, reduction, root)
        plan = engine.book.choose(op, nbytes, root, algorithm).plan
        if engine.book.needs_widening(plan, staged.dtype, reduction):
            return _in_place_wide(engine, op, x, reduction, root, algorithm, async_op)
        call = engine.book.prepare(key, plan)
    engine.remember_quick(op, staged, staged, as_written, root, algorithm, call)
    memory = [(address, nbytes)]
    return engine.run(
        call, memory, memory, x, keep=staged, async_op=async_op, complete=staged.restore
    )


def _in_place_wide(
    engine: Engine,
    op: Op,
    x: Array,
    reduction: ReduceOp,
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """In float32, so that the result is rounded once whatever the algorithm."""
    wide = widened(x)
    in_place(engine, op, wide, reduction, root, algorithm, False)
    if op is Op.ALL_REDUCE or engine.rank == root:
        assign(x, wide)
    return FinishedWork(x) if async_op else x


def gathering(
    engine: Engine,
    op: Op,
    x: Array,
    out: Array | Sequence[Array] | None,
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """all_gather and gather: one piece in, one piece per rank out."""
    source = stage(x, writable=False)
    receives = op is Op.ALL_GATHER or engine.rank == root
    if not receives:
        out = None
    elif out is None:
        first = x.shape[0] if len(x.shape) else 1
        out = empty(x, (first * engine.size, *x.shape[1:]))
    if isinstance(out, (list, tuple)):
        targets = stage_pieces(out, engine.size, writable=True, what="out")
        return _gather_pieces(engine, op, source, targets, out, root, algorithm, async_op)
    key = (op, source.located[1] * engine.size, source.located[2], ReduceOp.SUM, root, algorithm)
    call = engine.book.find(key)
    if call is None:
        engine.book.check(op, source.dtype, ReduceOp.SUM, root)
        plan = engine.book.choose(op, key[1], root, algorithm).plan
        call = engine.book.prepare(key, plan)
    if out is None:
        memory = (source.located[0], source.located[1])
        return engine.run(call, [memory], [memory], None, keep=source, async_op=async_op)
    target = stage(out, writable=True)
    _require_same(source, target, source.count * engine.size, "out")
    engine.remember_quick(op, source, target, "sum", root, algorithm, call)
    inputs = [source.located[:2]]
    outputs = _shares(target.located, engine.size)
    return engine.run(
        call,
        inputs,
        outputs,
        out,
        keep=(source, target),
        async_op=async_op,
        complete=target.restore,
    )


def _gather_pieces(
    engine: Engine,
    op: Op,
    source: Staged,
    targets: list[Staged],
    out: Sequence[Array],
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    lengths = tuple(target.located[1] for target in targets)
    own = targets[engine.rank]
    _require_same(source, own, own.count, f"out[{engine.rank}]")
    engine.book.check(op, source.dtype, ReduceOp.SUM, root)
    if len(set(lengths)) == 1:
        key = (op, lengths[0] * engine.size, int(source.dtype), ReduceOp.SUM, root, algorithm)
        plan = engine.book.choose(op, key[1], root, algorithm).plan
        call = engine.book.find(key) or engine.book.prepare(key, plan)
    else:
        _require_known_lengths(op)
        call = engine.book.prepare_uneven(op, source.dtype, ReduceOp.SUM, root, lengths, algorithm)
    return engine.run(
        call,
        [source.located[:2]],
        [t.located[:2] for t in targets],
        out,
        keep=(source, targets),
        async_op=async_op,
        complete=_restore_all(targets),
    )


def scattering(
    engine: Engine,
    op: Op,
    x: Array | Sequence[Array] | None,
    out: Array | None,
    root: int,
    reduction: str | ReduceOp,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """reduce_scatter and scatter: one piece per rank in, one piece out."""
    as_written, reduction = reduction, parse_reduction(reduction)
    engine.book.check(op, DType.UINT8, ReduceOp.SUM, root)
    gives = op is Op.REDUCE_SCATTER or engine.rank == root
    if not gives:
        if out is None:
            raise ValueError("scatter needs out on every rank but the root")
        target = stage(out, writable=True)
        sources = [target]
        lengths: tuple[int, ...] = (target.located[1],) * engine.size
    else:
        if x is None:
            raise ValueError(f"{op} needs x on this rank")
        sources = _sources(x, engine.size)
        lengths = _lengths(sources, engine.size, op)
        if out is None:
            out = _share_of(x, engine.size, engine.rank)
        target = stage(out, writable=True)
    dtype = target.dtype
    own_bytes = lengths[engine.rank]
    if sources[0].located[2] != target.located[2] or target.located[1] != own_bytes:
        raise ValueError(
            f"out has {target.count} elements of {target.dtype.name.lower()}, but the share of "
            f"rank {engine.rank} is {own_bytes // sources[0].dtype.size_bytes} of "
            f"{sources[0].dtype.name.lower()}"
        )
    engine.book.check(op, dtype, reduction, root)
    even = len(set(lengths)) == 1
    plan = engine.book.choose(op, sum(lengths), root, algorithm).plan
    if engine.book.needs_widening(plan, dtype, reduction):
        wide_x = [widened(s.array) for s in sources] if isinstance(x, (list, tuple)) else widened(x)
        wide = scattering(engine, op, wide_x, None, root, reduction, algorithm, False)
        assign(out, wide)
        return FinishedWork(out) if async_op else out
    if even:
        key = (op, lengths[0] * engine.size, int(dtype), reduction, root, algorithm)
        call = engine.book.find(key) or engine.book.prepare(key, plan)
        if op is Op.REDUCE_SCATTER and len(sources) == 1:
            engine.remember_quick(op, sources[0], target, as_written, root, algorithm, call)
    else:
        _require_known_lengths(op)
        call = engine.book.prepare_uneven(op, dtype, reduction, root, lengths, algorithm)
    inputs = _memory(sources, engine.size) if gives else [target.located[:2]]
    return engine.run(
        call,
        inputs,
        [target.located[:2]],
        out,
        keep=(sources, target),
        async_op=async_op,
        complete=target.restore,
    )


def all_to_all(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | Sequence[Array] | None,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """One piece per rank in and out."""
    sources = _sources(x, engine.size)
    if out is None:
        if isinstance(x, (list, tuple)):
            raise ValueError("all_to_all needs out where x is a list: its lengths are the peers'")
        out = empty(x, tuple(x.shape))  # type: ignore[union-attr]
    targets = _sources(out, engine.size, writable=True)
    if sources[0].located[2] != targets[0].located[2]:
        raise ValueError(
            f"x has type {sources[0].dtype.name.lower()}, out {targets[0].dtype.name.lower()}"
        )
    dtype = sources[0].dtype
    sources = _apart(sources, targets)
    if isinstance(x, (list, tuple)) or isinstance(out, (list, tuple)):
        call = _prepare_uneven_all_to_all(engine, sources, targets, dtype, algorithm)
    else:
        nbytes = sources[0].located[1]
        _lengths(sources, engine.size, Op.ALL_TO_ALL)
        if targets[0].located[1] != nbytes:
            raise ValueError(f"x has {sources[0].count} elements, out {targets[0].count}")
        key = (Op.ALL_TO_ALL, nbytes, int(dtype), ReduceOp.SUM, -1, algorithm)
        plan = engine.book.choose(Op.ALL_TO_ALL, nbytes, -1, algorithm).plan
        call = engine.book.find(key) or engine.book.prepare(key, plan)
        engine.remember_quick(Op.ALL_TO_ALL, sources[0], targets[0], "sum", -1, algorithm, call)
    return engine.run(
        call,
        _memory(sources, engine.size),
        _memory(targets, engine.size),
        out,
        keep=(sources, targets),
        async_op=async_op,
        complete=_restore_all(targets),
    )


def _prepare_uneven_all_to_all(
    engine: Engine,
    sources: list[Staged],
    targets: list[Staged],
    dtype: DType,
    algorithm: str | None,
) -> native.Prepared:
    """The ranks tell each other what they send, since nobody knows all lengths."""
    size = engine.size
    sent = [length for _, length in _memory(sources, size)]
    wanted = [length for _, length in _memory(targets, size)]
    mine = np.array([[int(dtype)] * size, sent, wanted], np.int64)
    table = gathering(engine, Op.ALL_GATHER, mine, None, -1, None, False).reshape(size, 3, size)
    for src in range(size):
        for dst in range(size):
            if table[src, 0, 0] != table[dst, 0, 0] or table[src, 1, dst] != table[dst, 2, src]:
                kinds = [DType(int(table[r, 0, 0])).name.lower() for r in (src, dst)]
                text = (
                    f"all_to_all: rank {src} sends {table[src, 1, dst]} bytes of {kinds[0]} to "
                    f"rank {dst}, which receives {table[dst, 2, src]} bytes of {kinds[1]}"
                )
                engine.group.abort(text)
                raise MismatchError(text)
    lengths = tuple(int(length) for length in table[:, 1, :].ravel())
    return engine.book.prepare_uneven(Op.ALL_TO_ALL, dtype, ReduceOp.SUM, -1, lengths, algorithm)


# ---- small helpers


def _sources(x: Array | Sequence[Array], ranks: int, *, writable: bool = False) -> list[Staged]:
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


def _lengths(sources: list[Staged], ranks: int, op: Op) -> tuple[int, ...]:
    if len(sources) == 1 and ranks > 1 and sources[0].count % ranks:
        raise ValueError(
            f"{op}: {sources[0].count} elements cannot be shared equally by {ranks} ranks"
        )
    return tuple(length for _, length in _memory(sources, ranks))


def _share_of(x: Array | Sequence[Array], ranks: int, rank: int) -> Array:
    """An empty array for the share of this rank."""
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
    copies = []
    for source in sources:
        copy = empty(source.array, tuple(source.array.shape))
        assign(copy, source.array)
        copies.append(stage(copy, writable=False))
    return copies


def _restore_all(targets: list[Staged]) -> Callable[[], None]:
    def restore() -> None:
        for target in targets:
            target.restore()

    return restore


def _require_same(source: Staged, target: Staged, count: int, name: str) -> None:
    if source.located[2] != target.located[2]:
        raise ValueError(
            f"x has type {source.dtype.name.lower()}, {name} {target.dtype.name.lower()}"
        )
    expected = count if name == "out" else source.count
    if target.count != expected:
        raise ValueError(f"{name} has {target.count} elements, but needs {expected}")


def _require_known_lengths(op: Op) -> None:
    if op.rooted:
        raise ValueError(f"{op}: all pieces must have one length")
