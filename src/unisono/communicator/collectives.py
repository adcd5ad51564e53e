"""Memory and checks of each collective: makes the `Call` of a method of `Communicator`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from unisono.communicator.arrays import (
    Array,
    Located,
    Staged,
    assign,
    dtype_of,
    duplicate,
    empty_like,
    overlap,
    stage,
    stage_pieces,
    widened,
)
from unisono.communicator.calls import CallRequest, parse_reduction
from unisono.communicator.engine import Call, Engine, Memory
from unisono.communicator.premul import PremulSum, float_factor, scale
from unisono.schedule import Schedule
from unisono.types import DType, LengthsFrom, Op, ReduceOp

Reduction: TypeAlias = str | ReduceOp | PremulSum
Change: TypeAlias = Callable[[Array], None]


def barrier(engine: Engine) -> Call:
    """Makes the call of a barrier."""
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
    """Makes all_reduce, reduce, broadcast, scan and exscan: one array is input and output."""
    receives = _receives(op, engine.rank, root)
    staged = stage(x, writable=receives)
    memory, complete = staged, _restoring([staged]) if receives else None
    request = _request(engine, op, staged, staged.located[1:2], reduction, root, algorithm)
    engine.call_cache.check(request)
    change = _change_of(engine, reduction, request)
    own = None  # a copy that replaces x
    if engine.call_cache.widens(request):
        # Reduce in float32, so that every algorithm rounds the result once.
        factor = float_factor(reduction)
        own = widened(x, factor)
        change = change if factor is None else None  # widened has applied the factor
        request = _wide(request)
    elif change is not None and (engine.recording or not receives):
        own = duplicate(x)  # x stays unchanged until the end of a batch, which may be cancelled
    if own is not None:
        memory = stage(own, writable=True)
        complete = _assigning(x, own) if receives else None
    call = engine.call_cache.call(request)
    if change is not None:
        change(memory.array if memory.copy is None else memory.copy)
    elif request.caller_dtype is None:
        engine.remember_quick(op, staged, staged, reduction, root, algorithm, call)
    where = [memory.located[:2]]
    return Call(call, where, where, x, (staged, memory), request, complete)


def _receives(op: Op, rank: int, root: int) -> bool:
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
    """Makes all_gather and gather: one piece in, one piece per rank out.

    `lengths` are the bytes of all pieces. A rank of a gather that is not the root needs this
    argument if they differ. Errors name `lengths_from`.
    """
    source = stage(x, writable=False)
    if op is Op.GATHER and engine.rank != root:
        lengths = lengths or (source.located[1],) * engine.size
        request = _request(engine, op, source, lengths, "sum", root, algorithm, lengths_from)
        where = [source.located[:2]]  # this rank has no output
        return Call(engine.call_cache.call(request), where, where, None, source, request)
    if out is None:
        first = x.shape[0] if len(x.shape) else 1
        out = empty_like(x, (first * engine.size, *x.shape[1:]))
    targets = _stage_many(out, engine.size, writable=True)
    needed = source.count * engine.size
    if len(targets) == 1 and targets[0].count != needed:
        raise ValueError(f"{op}: out has {_text(targets[0])}, but needs {needed}")
    found = _lengths(targets, engine.size, "out")
    if source.dtype is not targets[0].dtype or source.located[1] != found[engine.rank]:
        raise ValueError(
            f"{op}: x has {_text(source)}, but its place in out has "
            f"{_text(targets[0], found[engine.rank])}"
        )
    if op is Op.GATHER and lengths is None:
        _require_even(engine, op, targets, "out")
    request = _request(engine, op, source, found, "sum", root, algorithm, lengths_from)
    call = engine.call_cache.call(request)
    where = memory_of(targets, engine.size)
    if source.located[0] != where[engine.rank][0]:
        source = _copied_where_overlapping([source], targets)[0]
    if op is Op.ALL_GATHER and len(targets) == 1:
        engine.remember_quick(op, source, targets[0], "sum", root, algorithm, call)
    inputs = [source.located[:2]]
    return Call(call, inputs, where, out, (source, targets), request, _restoring(targets))


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
    """Makes reduce_scatter and scatter: one piece per rank in, one piece out.

    `lengths` are the bytes of all pieces. A rank of a scatter that is not the root needs this
    argument if they differ. Errors name `lengths_from`.
    """
    if op is Op.SCATTER and engine.rank != root:
        return _scattering_off_root(engine, out, root, algorithm, lengths, lengths_from)
    if x is None:
        raise ValueError(f"{op} needs x on this rank")
    sources = _stage_many(x, engine.size, writable=False)
    found = _lengths(sources, engine.size, "x")
    if out is None:
        out = share_of(x, engine.size, engine.rank)
    target = stage(out, writable=True)
    if sources[0].dtype is not target.dtype or target.located[1] != found[engine.rank]:
        raise ValueError(
            f"{op}: out has {_text(target)}, but the share of rank {engine.rank} is "
            f"{_text(sources[0], found[engine.rank])}"
        )
    if op is Op.SCATTER and lengths is None:
        _require_even(engine, op, sources, "x")
    request = _request(engine, op, target, found, reduction, root, algorithm, lengths_from)
    engine.call_cache.check(request)
    change = _change_of(engine, reduction, request)
    if engine.call_cache.widens(request):
        factor = float_factor(reduction)
        change = change if factor is None else None
        wide = [_changed(widened(source.array, factor), change) for source in sources]
        return _scattering_wide(engine, request, wide, target, out)
    call = engine.call_cache.call(request)
    if change is not None:
        sources = [_changed(duplicate(source.array), change) for source in sources]
    elif memory_of(sources, engine.size)[engine.rank][0] != target.located[0]:
        sources = _copied_where_overlapping(sources, [target])
    if op is Op.REDUCE_SCATTER and len(sources) == 1 and change is None:
        engine.remember_quick(op, sources[0], target, reduction, root, algorithm, call)
    inputs, where = memory_of(sources, engine.size), [target.located[:2]]
    return Call(call, inputs, where, out, (sources, target), request, _restoring([target]))


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
        share = _text(target, lengths[engine.rank])
        raise ValueError(
            f"scatter: out has {_text(target)}, but the share of rank {engine.rank} is {share}"
        )
    request = _request(engine, Op.SCATTER, target, lengths, "sum", root, algorithm, lengths_from)
    where = [target.located[:2]]
    call = engine.call_cache.call(request)
    return Call(call, where, where, out, target, request, _restoring([target]))


def _scattering_wide(
    engine: Engine,
    request: CallRequest,
    wide_sources: list[Staged],
    target: Staged,
    out: Array,
) -> Call:
    """Makes a reduce_scatter in float32, so that every algorithm rounds the result once."""
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
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """Makes all_to_all: one piece per rank in and out.

    `lengths` are the bytes from each rank to each rank, if pieces differ in length. They agree with
    this rank's pieces. Errors name `lengths_from`.
    """
    if out is None:
        dtype_of(x)  # raises unless x is an array
        out = empty_like(x, tuple(x.shape))  # type: ignore[union-attr]
    sources, targets = both_sides(engine, x, out)
    if lengths is None:
        lengths = _lengths(sources, engine.size, "x")
        if targets[0].located[1] != sources[0].located[1]:
            raise ValueError(f"all_to_all: x has {_text(sources[0])}, out {_text(targets[0])}")
    return all_to_all_between(engine, sources, targets, out, algorithm, lengths, lengths_from)


def both_sides(
    engine: Engine, x: Array | Sequence[Array], out: Array | Sequence[Array]
) -> tuple[list[Staged], list[Staged]]:
    """Returns the memory that an all_to_all reads and the memory that it writes."""
    sources = _stage_many(x, engine.size, writable=False)
    targets = _stage_many(out, engine.size, writable=True)
    if sources[0].dtype is not targets[0].dtype:
        raise ValueError(f"all_to_all: x has {_text(sources[0])}, out {_text(targets[0])}")
    return _copied_where_overlapping(sources, targets), targets


def all_to_all_between(
    engine: Engine,
    sources: list[Staged],
    targets: list[Staged],
    out: Array | Sequence[Array],
    algorithm: str | Schedule | None,
    lengths: tuple[int, ...],
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """Makes an all_to_all from memory that `both_sides` has prepared."""
    if len(set(lengths)) == 1:  # an even call: one length per rank is enough
        lengths = lengths[: engine.size]
    request = _request(
        engine, Op.ALL_TO_ALL, sources[0], lengths, "sum", -1, algorithm, lengths_from
    )
    call = engine.call_cache.call(request)
    if len(sources) == 1 and len(targets) == 1:
        engine.remember_quick(Op.ALL_TO_ALL, sources[0], targets[0], "sum", -1, algorithm, call)
    return Call(
        call,
        memory_of(sources, engine.size),
        memory_of(targets, engine.size),
        out,
        (sources, targets),
        request,
        _restoring(targets),
    )


def _require_even(engine: Engine, op: Op, pieces: list[Staged], name: str) -> None:
    """Ends the group if pieces on the root differ. Only the root sees this, but all ranks must
    fail.
    """
    if len({piece.located[1] for piece in pieces}) > 1:
        counts = [piece.count for piece in pieces]
        engine.disagree(
            f"{op}: the pieces of {name} on root {engine.rank} have {counts} elements, but {op} "
            f"needs pieces of one length: call {op}_v on all ranks instead"
        )


# ---- small helpers


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
    """Returns the change of this rank's contribution, in place, before the call; None if there is
    none.
    """
    if isinstance(reduction, PremulSum):
        return functools.partial(scale, factor=reduction.factor)
    # Otherwise the reduction makes results 0 or 1. Here a result may be a contribution unchanged.
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


def _stage_many(x: Array | Sequence[Array], ranks: int, *, writable: bool) -> list[Staged]:
    """Returns the memory of one array for all ranks, or of one array per rank."""
    if isinstance(x, (list, tuple)):
        return stage_pieces(x, ranks, writable=writable, what="out" if writable else "x")
    return [stage(x, writable=writable)]


def memory_of(staged: list[Staged], ranks: int) -> Memory:
    """Returns address and bytes of the piece of each rank."""
    if len(staged) == 1:
        return _shares(staged[0].located, ranks)
    return [piece.located[:2] for piece in staged]


def _shares(located: Located, ranks: int) -> Memory:
    share = located[1] // ranks
    return [(located[0] + r * share, share) for r in range(ranks)]


def _lengths(staged: list[Staged], ranks: int, name: str) -> tuple[int, ...]:
    if len(staged) == 1 and staged[0].count % ranks:
        raise ValueError(
            f"{name}: expected a multiple of {ranks} elements, but it has {_text(staged[0])}"
        )
    return tuple(length for _, length in memory_of(staged, ranks))


def share_of(x: Array | Sequence[Array], ranks: int, rank: int) -> Array:
    """Returns an empty array for the share of a rank."""
    if isinstance(x, (list, tuple)):
        return empty_like(x[rank], tuple(x[rank].shape))
    shape = tuple(x.shape)  # type: ignore[union-attr]
    if shape and shape[0] % ranks == 0:
        return empty_like(x, (shape[0] // ranks, *shape[1:]))
    return empty_like(x, (int(np.prod(shape)) // ranks,))


def _copied_where_overlapping(sources: list[Staged], targets: list[Staged]) -> list[Staged]:
    """Returns `sources`, or copies of them if the results would overwrite them before they are
    sent.
    """
    if not overlap(_extent(sources), _extent(targets)) or not any(
        overlap(s.located, t.located) for s in sources for t in targets
    ):
        return sources
    return [stage(duplicate(source.array), writable=False) for source in sources]


def _extent(staged: list[Staged]) -> Located:
    """Returns the memory from the start of the first array to the end of the last."""
    start = min(each.located[0] for each in staged)
    return start, max(sum(each.located[:2]) for each in staged) - start, staged[0].located[2]


def _assigning(target: Array, value: Array) -> Callable[[], None]:
    return lambda: assign(target, value)


def _restoring(targets: list[Staged]) -> Callable[[], None] | None:
    copied = [target for target in targets if target.copy is not None]
    if not copied:
        return None

    def restore() -> None:
        for target in copied:
            target.restore()

    return restore


def _text(staged: Staged, nbytes: int | None = None) -> str:
    count = staged.count if nbytes is None else nbytes // staged.dtype.size_bytes
    return f"{count} elements of {staged.dtype.name.lower()}"
