"""How each collective finds its memory, checks it, and runs: the half behind `Communicator`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

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
from unisono.communicator.work import CollectiveWork, FinishedWork
from unisono.errors import MismatchError
from unisono.runtime.native_executor import OP_CODES
from unisono.types import DType, Op, ReduceOp

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

Memory: TypeAlias = list[tuple[int, int]]

# How long an asynchronous call may wait for its peers in the caller's thread. Peers that are about
# to arrive spare the hand-over to the progress thread, which costs about as much.
_INLINE_S = 100e-6


def run(
    comm: Communicator,
    call: native.Prepared,
    inputs: Memory,
    outputs: Memory,
    result: Any,
    *,
    keep: object,
    async_op: bool,
    complete: Callable[[], None] | None = None,
) -> Any:
    """Runs the call, or begins it."""
    if not async_op:
        comm._group.run_pieces(call, inputs, outputs, comm.timeout_s)
        if complete is not None:
            complete()
        return result
    job = comm._group.submit_pieces(call, inputs, outputs, comm.timeout_s, _INLINE_S)
    work = CollectiveWork(comm._group, job, keep, result, complete)
    if not job.done():
        comm._keep(work)
    return work


def barrier(comm: Communicator, *, async_op: bool) -> Any:
    """All ranks meet."""
    key = (Op.BARRIER, 0, int(DType.UINT8), ReduceOp.SUM, -1, None)
    call = comm._book.find(key)
    if call is None:
        call = comm._book.prepare(key, comm._book.choose(Op.BARRIER, 0, -1, None).plan)
    return run(comm, call, [], [], None, keep=None, async_op=async_op)


def in_place(
    comm: Communicator,
    op: Op,
    x: Array,
    reduction: str | ReduceOp,
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """all_reduce, reduce, broadcast: one array that is input and output."""
    as_written, reduction = reduction, parse_reduction(reduction)
    staged = stage(x, writable=op is Op.ALL_REDUCE or (comm.rank == root) is (op is Op.REDUCE))
    address, nbytes, dtype = staged.located
    key = (op, nbytes, dtype, reduction, root, algorithm)
    call = comm._book.find(key)
    if call is None:
        comm._book.check(op, staged.dtype, reduction, root)
        plan = comm._book.choose(op, nbytes, root, algorithm).plan
        if comm._book.needs_widening(plan, staged.dtype, reduction):
            return _in_place_wide(comm, op, x, reduction, root, algorithm, async_op)
        call = comm._book.prepare(key, plan)
    _remember_quick(comm, op, staged, staged, as_written, root, algorithm, call)
    memory = [(address, nbytes)]
    return run(
        comm, call, memory, memory, x, keep=staged, async_op=async_op, complete=staged.restore
    )


def _in_place_wide(
    comm: Communicator,
    op: Op,
    x: Array,
    reduction: ReduceOp,
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """In float32, so that the result is rounded once whatever the algorithm."""
    wide = widened(x)
    in_place(comm, op, wide, reduction, root, algorithm, False)
    if op is Op.ALL_REDUCE or comm.rank == root:
        assign(x, wide)
    return FinishedWork(x) if async_op else x


def gathering(
    comm: Communicator,
    op: Op,
    x: Array,
    out: Array | Sequence[Array] | None,
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """all_gather and gather: one piece in, one piece per rank out."""
    source = stage(x, writable=False)
    receives = op is Op.ALL_GATHER or comm.rank == root
    if not receives:
        out = None
    elif out is None:
        first = x.shape[0] if len(x.shape) else 1
        out = empty(x, (first * comm.size, *x.shape[1:]))
    if isinstance(out, (list, tuple)):
        targets = stage_pieces(out, comm.size, writable=True, what="out")
        return _gather_pieces(comm, op, source, targets, out, root, algorithm, async_op)
    key = (op, source.located[1] * comm.size, source.located[2], ReduceOp.SUM, root, algorithm)
    call = comm._book.find(key)
    if call is None:
        comm._book.check(op, source.dtype, ReduceOp.SUM, root)
        plan = comm._book.choose(op, key[1], root, algorithm).plan
        call = comm._book.prepare(key, plan)
    if out is None:
        memory = (source.located[0], source.located[1])
        return run(comm, call, [memory], [memory], None, keep=source, async_op=async_op)
    target = stage(out, writable=True)
    _require_same(source, target, source.count * comm.size, "out")
    _remember_quick(comm, op, source, target, "sum", root, algorithm, call)
    inputs = [source.located[:2]]
    outputs = _shares(target.located, comm.size)
    return run(
        comm, call, inputs, outputs, out, keep=(source, target), async_op=async_op,
        complete=target.restore,
    )


def _gather_pieces(
    comm: Communicator,
    op: Op,
    source: Staged,
    targets: list[Staged],
    out: Sequence[Array],
    root: int,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    lengths = tuple(target.located[1] for target in targets)
    own = targets[comm.rank]
    _require_same(source, own, own.count, f"out[{comm.rank}]")
    comm._book.check(op, source.dtype, ReduceOp.SUM, root)
    if len(set(lengths)) == 1:
        key = (op, lengths[0] * comm.size, int(source.dtype), ReduceOp.SUM, root, algorithm)
        plan = comm._book.choose(op, key[1], root, algorithm).plan
        call = comm._book.find(key) or comm._book.prepare(key, plan)
    else:
        _require_known_lengths(op)
        call = comm._book.prepare_uneven(
            op, source.dtype, ReduceOp.SUM, root, lengths, algorithm
        )
    return run(
        comm, call, [source.located[:2]], [t.located[:2] for t in targets], out,
        keep=(source, targets), async_op=async_op, complete=_restore_all(targets),
    )


def scattering(
    comm: Communicator,
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
    comm._book.check(op, DType.UINT8, ReduceOp.SUM, root)
    gives = op is Op.REDUCE_SCATTER or comm.rank == root
    if not gives:
        if out is None:
            raise ValueError("scatter needs out on every rank but the root")
        target = stage(out, writable=True)
        sources = [target]
        lengths: tuple[int, ...] = (target.located[1],) * comm.size
    else:
        if x is None:
            raise ValueError(f"{op} needs x on this rank")
        sources = _sources(x, comm.size)
        lengths = _lengths(sources, comm.size, op)
        if out is None:
            out = _share_of(x, comm.size, comm.rank)
        target = stage(out, writable=True)
    dtype = target.dtype
    own_bytes = lengths[comm.rank]
    if sources[0].located[2] != target.located[2] or target.located[1] != own_bytes:
        raise ValueError(
            f"out has {target.count} elements of {target.dtype.name.lower()}, but the share of "
            f"rank {comm.rank} is {own_bytes // sources[0].dtype.size_bytes} of "
            f"{sources[0].dtype.name.lower()}"
        )
    comm._book.check(op, dtype, reduction, root)
    even = len(set(lengths)) == 1
    plan = comm._book.choose(op, sum(lengths), root, algorithm).plan
    if comm._book.needs_widening(plan, dtype, reduction):
        wide_x = [widened(s.array) for s in sources] if isinstance(x, (list, tuple)) else widened(x)
        wide = scattering(comm, op, wide_x, None, root, reduction, algorithm, False)
        assign(out, wide)
        return FinishedWork(out) if async_op else out
    if even:
        key = (op, lengths[0] * comm.size, int(dtype), reduction, root, algorithm)
        call = comm._book.find(key) or comm._book.prepare(key, plan)
        if op is Op.REDUCE_SCATTER and len(sources) == 1:
            _remember_quick(comm, op, sources[0], target, as_written, root, algorithm, call)
    else:
        _require_known_lengths(op)
        call = comm._book.prepare_uneven(op, dtype, reduction, root, lengths, algorithm)
    inputs = _memory(sources, comm.size) if gives else [target.located[:2]]
    return run(
        comm, call, inputs, [target.located[:2]], out, keep=(sources, target),
        async_op=async_op, complete=target.restore,
    )


def all_to_all(
    comm: Communicator,
    x: Array | Sequence[Array],
    out: Array | Sequence[Array] | None,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """One piece per rank in and out."""
    sources = _sources(x, comm.size)
    if out is None:
        if isinstance(x, (list, tuple)):
            raise ValueError("all_to_all needs out where x is a list: its lengths are the peers'")
        out = empty(x, tuple(x.shape))
    targets = _sources(out, comm.size, writable=True)
    if sources[0].located[2] != targets[0].located[2]:
        raise ValueError(
            f"x has type {sources[0].dtype.name.lower()}, out {targets[0].dtype.name.lower()}"
        )
    dtype = sources[0].dtype
    sources = _apart(sources, targets)
    if isinstance(x, (list, tuple)) or isinstance(out, (list, tuple)):
        call = _prepare_uneven_all_to_all(comm, sources, targets, dtype, algorithm)
    else:
        nbytes = sources[0].located[1]
        _lengths(sources, comm.size, Op.ALL_TO_ALL)
        if targets[0].located[1] != nbytes:
            raise ValueError(f"x has {sources[0].count} elements, out {targets[0].count}")
        key = (Op.ALL_TO_ALL, nbytes, int(dtype), ReduceOp.SUM, -1, algorithm)
        plan = comm._book.choose(Op.ALL_TO_ALL, nbytes, -1, algorithm).plan
        call = comm._book.find(key) or comm._book.prepare(key, plan)
        _remember_quick(comm, Op.ALL_TO_ALL, sources[0], targets[0], "sum", -1, algorithm, call)
    return run(
        comm, call, _memory(sources, comm.size), _memory(targets, comm.size), out,
        keep=(sources, targets), async_op=async_op, complete=_restore_all(targets),
    )


def _prepare_uneven_all_to_all(
    comm: Communicator,
    sources: list[Staged],
    targets: list[Staged],
    dtype: DType,
    algorithm: str | None,
) -> native.Prepared:
    """The ranks tell each other what they send, since nobody knows all lengths."""
    size = comm.size
    sent = [length for _, length in _memory(sources, size)]
    wanted = [length for _, length in _memory(targets, size)]
    mine = np.array([[int(dtype)] * size, sent, wanted], np.int64)
    table = comm.all_gather(mine).reshape(size, 3, size)
    for src in range(size):
        for dst in range(size):
            if table[src, 0, 0] != table[dst, 0, 0] or table[src, 1, dst] != table[dst, 2, src]:
                kinds = [DType(int(table[r, 0, 0])).name.lower() for r in (src, dst)]
                text = (
                    f"all_to_all: rank {src} sends {table[src, 1, dst]} bytes of {kinds[0]} to "
                    f"rank {dst}, which receives {table[dst, 2, src]} bytes of {kinds[1]}"
                )
                comm.abort(text)
                raise MismatchError(text)
    lengths = tuple(int(length) for length in table[:, 1, :].ravel())
    return comm._book.prepare_uneven(
        Op.ALL_TO_ALL, dtype, ReduceOp.SUM, -1, lengths, algorithm
    )


# ---- small helpers


def _remember_quick(
    comm: Communicator,
    op: Op,
    source: Staged,
    target: Staged,
    reduction: str | ReduceOp,
    root: int,
    algorithm: str | None,
    call: native.Prepared,
) -> None:
    """Lets the next such call skip what led here; only where nothing was copied."""
    if source.copy is not None or target.copy is not None:
        return
    comm._quick.learn(
        OP_CODES[op], source.located, target.located, reduction, root, algorithm, call
    )


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
    shape = tuple(x.shape)
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
