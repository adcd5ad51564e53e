"""Makes the `Call` of each collective method of `Communicator`: checks arguments, prepares
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from unisono.communicator.arrays import (
    Array,
    Staged,
    assign,
    dtype_of,
    duplicate,
    empty_like,
    stage,
    widened,
)
from unisono.communicator.call_cache import CallRequest, parse_reduction
from unisono.communicator.collective_memory import (
    Pieces,
    assigning,
    copied_where_overlapping,
    lengths_of,
    memory_of,
    restoring,
    share_of,
    stage_many,
    text_of,
)
from unisono.communicator.engine import Call, Engine, Memory
from unisono.communicator.premul import PremulSum, float_factor, scale
from unisono.schedule import Schedule
from unisono.types import DType, LengthsFrom, Op, ReduceOp

Reduction: TypeAlias = str | ReduceOp | PremulSum
Change: TypeAlias = Callable[[Array], None]


def barrier(engine: Engine) -> Call:
    """Prepares the call of a barrier."""
    nothing: Memory = [] if len(engine.call_cache.hosts) == 1 else [(0, 0)]
    return Call(engine.call_cache.barrier(), nothing, nothing, None, None)


def in_place(
    engine: Engine,
    op: Op,
    x: Array,
    reduction: Reduction,
    root: int,
    algorithm: str | Schedule | None,
) -> Call:
    """Prepares the call of an all_reduce, reduce, broadcast, scan or exscan. One array is input and
    output.
    """
    changes = receives(op, engine.rank, root)
    staged = stage(x, writable=changes)
    memory, complete = staged, restoring([staged]) if changes else None
    request = _request(engine, op, staged, staged.located[1:2], reduction, root, algorithm)
    engine.call_cache.check(request)
    change = _change_of(engine, reduction, request)
    own = None  # a copy to use instead of x
    if engine.call_cache.widens(request):
        # Reduce in float32, so that every algorithm rounds the result once.
        factor = float_factor(reduction)
        own = widened(x, factor)
        change = change if factor is None else None  # widened has applied the factor
        request = _wide(request)
    elif change is not None and (engine.recording or not changes):
        own = duplicate(x)  # x must not change: the batch may be cancelled, or x is only input
    if own is not None:
        memory = stage(own, writable=True)
        complete = assigning(x, own) if changes else None
    call = engine.call_cache.call(request)
    if change is not None:
        change(memory.array if memory.copy is None else memory.copy)
    elif request.caller_dtype is None:
        engine.remember_quick(op, staged, staged, reduction, root, algorithm, call)
    where = [memory.located[:2]]
    return Call(call, where, where, x, (staged, memory), request, complete)


def receives(op: Op, rank: int, root: int) -> bool:
    """Returns True if the operation changes this rank's array."""
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
    lengths: tuple[int, ...] | None = None,
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """Prepares the call of an all_gather or gather. The input is this rank's piece; the output has
    the pieces of all ranks.

    `lengths` are the bytes of all pieces. In a gather, a rank other than the root needs this
    argument if the lengths differ. Errors name `lengths_from` as the origin of the lengths.
    """
    source = stage(x, writable=False)
    if op is Op.GATHER and engine.rank != root:
        return _gathering_off_root(engine, source, root, algorithm, lengths, lengths_from)
    if out is None:
        first = x.shape[0] if len(x.shape) else 1
        out = empty_like(x, (first * engine.size, *x.shape[1:]))
    targets = stage_many(out, engine.size, writable=True)
    needed = source.count * engine.size
    if len(targets) == 1 and targets[0].count != needed:
        raise ValueError(f"{op}: out has {text_of(targets[0])}, but needs {needed}")
    found = lengths_of(targets, engine.size, "out")
    _require_place(op, engine.rank, source, targets[0], found)
    if op is Op.GATHER and lengths is None:
        _require_even(engine, op, targets, "out")
    request = _request(engine, op, source, found, "sum", root, algorithm, lengths_from)
    call = engine.call_cache.call(request)
    where = memory_of(targets, engine.size)
    if source.located[0] != where[engine.rank][0]:
        source = copied_where_overlapping([source], targets)[0]
    if op is Op.ALL_GATHER and len(targets) == 1:
        engine.remember_quick(op, source, targets[0], "sum", root, algorithm, call)
    inputs = [source.located[:2]]
    return Call(call, inputs, where, out, (source, targets), request, restoring(targets))


def _require_place(
    op: Op, rank: int, source: Staged, target: Staged, lengths: tuple[int, ...]
) -> None:
    """Raises `ValueError` unless x has the type and size of this rank's piece of out."""
    if source.dtype is not target.dtype or source.located[1] != lengths[rank]:
        raise ValueError(
            f"{op}: x has {text_of(source)}, but its place in out has "
            f"{text_of(target, lengths[rank])}"
        )


def _gathering_off_root(
    engine: Engine,
    source: Staged,
    root: int,
    algorithm: str | Schedule | None,
    lengths: tuple[int, ...] | None,
    lengths_from: LengthsFrom,
) -> Call:
    """Makes a gather on a rank that is not the root."""
    lengths = lengths or (source.located[1],) * engine.size
    request = _request(engine, Op.GATHER, source, lengths, "sum", root, algorithm, lengths_from)
    where = [source.located[:2]]  # this rank has no output
    return Call(engine.call_cache.call(request), where, where, None, source, request)


def scattering(
    engine: Engine,
    op: Op,
    x: Array | Sequence[Array] | None,
    out: Array | None,
    root: int,
    reduction: Reduction,
    algorithm: str | Schedule | None,
    lengths: tuple[int, ...] | None = None,
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """Prepares the call of a reduce_scatter or scatter. The input has one piece for each rank; the
    output is this rank's piece.

    For `lengths` and `lengths_from`, see `gathering`.
    """
    if op is Op.SCATTER and engine.rank != root:
        return _scattering_off_root(engine, out, root, algorithm, lengths, lengths_from)
    if x is None:
        raise ValueError(f"{op} needs x on this rank")
    sources = stage_many(x, engine.size, writable=False)
    found = lengths_of(sources, engine.size, "x")
    out = share_of(x, engine.size, engine.rank) if out is None else out
    target = stage(out, writable=True)
    _require_share(op, engine.rank, sources[0], target, found)
    if op is Op.SCATTER and lengths is None:
        _require_even(engine, op, sources, "x")
    request = _request(engine, op, target, found, reduction, root, algorithm, lengths_from)
    engine.call_cache.check(request)
    change = _change_of(engine, reduction, request)
    if engine.call_cache.widens(request):
        return _scattering_wide(engine, request, reduction, change, sources, target, out)
    call = engine.call_cache.call(request)
    if change is not None:
        sources = [_changed(duplicate(source.array), change) for source in sources]
    elif memory_of(sources, engine.size)[engine.rank][0] != target.located[0]:
        sources = copied_where_overlapping(sources, [target])
    if op is Op.REDUCE_SCATTER and len(sources) == 1 and change is None:
        engine.remember_quick(op, sources[0], target, reduction, root, algorithm, call)
    inputs, where = memory_of(sources, engine.size), [target.located[:2]]
    return Call(call, inputs, where, out, (sources, target), request, restoring([target]))


def _require_share(
    op: Op, rank: int, source: Staged, target: Staged, lengths: tuple[int, ...]
) -> None:
    """Raises `ValueError` unless out has the type and size of this rank's share."""
    if source.dtype is not target.dtype or target.located[1] != lengths[rank]:
        raise ValueError(
            f"{op}: out has {text_of(target)}, but the share of rank {rank} is "
            f"{text_of(source, lengths[rank])}"
        )


def _scattering_off_root(
    engine: Engine,
    out: Array | None,
    root: int,
    algorithm: str | Schedule | None,
    lengths: tuple[int, ...] | None,
    lengths_from: LengthsFrom,
) -> Call:
    """Makes a scatter on a rank that is not the root."""
    if out is None:
        raise ValueError("scatter needs out on every rank but the root")
    target = stage(out, writable=True)
    if lengths is None:
        lengths = (target.located[1],) * engine.size
    elif lengths[engine.rank] != target.located[1]:
        share = text_of(target, lengths[engine.rank])
        raise ValueError(
            f"scatter: out has {text_of(target)}, but the share of rank {engine.rank} is {share}"
        )
    request = _request(engine, Op.SCATTER, target, lengths, "sum", root, algorithm, lengths_from)
    where = [target.located[:2]]
    call = engine.call_cache.call(request)
    return Call(call, where, where, out, target, request, restoring([target]))


def _scattering_wide(
    engine: Engine,
    request: CallRequest,
    reduction: Reduction,
    change: Change | None,
    sources: list[Staged],
    target: Staged,
    out: Array,
) -> Call:
    """Makes a reduce_scatter in float32, so that every algorithm rounds the result once."""
    factor = float_factor(reduction)
    change = change if factor is None else None  # widened applies the factor
    wide_sources = [_changed(widened(source.array, factor), change) for source in sources]
    wide_out = empty_like(wide_sources[0].array, (target.count,))
    wide_target = stage(wide_out, writable=True)
    request = _wide(request)

    def complete() -> None:
        assign(out, wide_out.reshape(tuple(out.shape)))

    return Call(
        engine.call_cache.call(request),
        memory_of(wide_sources, engine.size),
        [wide_target.located[:2]],
        out,
        (wide_sources, wide_target),
        request,
        complete,
    )


def all_to_all(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | Sequence[Array] | None,
    algorithm: str | Schedule | None,
    lengths: tuple[int, ...] | None = None,
) -> Call:
    """Prepares the call of an all_to_all. Input and output each have one piece for each rank.

    `lengths` are the bytes from each rank to each rank, if pieces differ in length. They agree with
    this rank's pieces.
    """
    if out is None:
        dtype_of(x)  # raises unless x is an array
        out = empty_like(x, tuple(x.shape))  # type: ignore[union-attr]
    sources, targets = both_sides(engine, x, out)
    if lengths is None:
        lengths = lengths_of(sources, engine.size, "x")
        if targets[0].located[1] != sources[0].located[1]:
            raise ValueError(f"all_to_all: x has {text_of(sources[0])}, out {text_of(targets[0])}")
    source, target = Pieces.of(sources, engine.size), Pieces.of(targets, engine.size)
    return all_to_all_between(engine, source, target, out, algorithm, lengths)


def both_sides(
    engine: Engine, x: Array | Sequence[Array], out: Array | Sequence[Array]
) -> tuple[list[Staged], list[Staged]]:
    """Returns the memory that an all_to_all reads and the memory that it writes."""
    sources = stage_many(x, engine.size, writable=False)
    targets = stage_many(out, engine.size, writable=True)
    if sources[0].dtype is not targets[0].dtype:
        raise ValueError(f"all_to_all: x has {text_of(sources[0])}, out {text_of(targets[0])}")
    return copied_where_overlapping(sources, targets), targets


def all_to_all_between(
    engine: Engine,
    source: Pieces,
    target: Pieces,
    out: Array | Sequence[Array] | None,
    algorithm: str | Schedule | None,
    lengths: tuple[int, ...],
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """Makes an all_to_all from arrays that `both_sides` has prepared. Errors name `lengths_from` as
    the origin of the lengths.
    """
    even = len(set(lengths)) == 1
    if even:  # one length per rank is enough
        lengths = lengths[: engine.size]
    first = source.staged[0]
    request = _request(engine, Op.ALL_TO_ALL, first, lengths, "sum", -1, algorithm, lengths_from)
    call = engine.call_cache.call(request)
    arrays = len(source.staged) + len(target.staged)
    if even and arrays == 2 and lengths_from is LengthsFrom.NONE:
        engine.remember_quick(Op.ALL_TO_ALL, first, target.staged[0], "sum", -1, algorithm, call)
    keep, complete = (source.staged, target.staged), restoring(target.staged)
    return Call(call, source.memory, target.memory, out, keep, request, complete)


def _require_even(engine: Engine, op: Op, pieces: list[Staged], name: str) -> None:
    """Aborts the group if pieces on the root differ in length. Only the root can detect this, but
    all ranks must fail.
    """
    if len({piece.located[1] for piece in pieces}) > 1:
        counts = [piece.count for piece in pieces]
        engine.disagree(
            f"{op}: the pieces of {name} on root {engine.rank} have {counts} elements, but {op} "
            f"needs pieces of one length: call {op}_v on all ranks instead"
        )


# ---- requests, and changes of contributions before a call


def _request(
    engine: Engine,
    op: Op,
    staged: Staged,
    lengths: tuple[int, ...],
    reduction: Reduction,
    root: int,
    algorithm: str | Schedule | None,
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> CallRequest:
    name = engine.call_cache.name(algorithm)
    kind = parse_reduction(reduction)
    return CallRequest(op, lengths, staged.dtype, kind, root, name, lengths_from=lengths_from)


def _change_of(engine: Engine, reduction: Reduction, request: CallRequest) -> Change | None:
    """Returns the function that changes this rank's contribution in place before the call, or
    None.
    """
    if isinstance(reduction, PremulSum):
        return functools.partial(scale, factor=reduction.factor)
    # The results of logical reductions must be 0 or 1. In these calls a result may be an unreduced
    # contribution, so make the elements of the contribution 0 or 1 here.
    if request.reduction.is_logical and (engine.size == 1 or request.op.scans):
        return lambda array: assign(array, array != 0)
    return None


def _changed(array: Array, change: Change | None) -> Staged:
    staged = stage(array, writable=True)
    if change is not None:
        change(array if staged.copy is None else staged.copy)
    return staged


def _wide(request: CallRequest) -> CallRequest:
    """Returns the same request for float32 copies of the elements."""
    factor = DType.FLOAT32.size_bytes // request.dtype.size_bytes
    lengths = tuple(length * factor for length in request.lengths)
    return request._replace(lengths=lengths, dtype=DType.FLOAT32, caller_dtype=request.dtype)
