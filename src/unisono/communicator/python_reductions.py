"""Reductions by a Python function, called in rank order.

Only these reductions call Python code, so they are slow. The ranks gather whole contributions, and
each rank that needs the result folds all contributions. `collectives` handles all other reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.communicator import collective_calls
from unisono.communicator.arrays import (
    Array,
    assign,
    dtype_of,
    empty_like,
    stage,
    stage_pieces,
)
from unisono.communicator.call_cache import CallRequest
from unisono.communicator.call_volume import made_internal
from unisono.communicator.collective_calls import Reduction
from unisono.communicator.collective_memory import share_of
from unisono.communicator.count_exchange import followed_by
from unisono.communicator.engine import Call, Engine, LaterUse
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.types import LengthsFrom, Op

Function: TypeAlias = Callable[[Array, Array], Array]
AnyReduction: TypeAlias = Reduction | Function

_CALL_BYTES = 256


def in_place(
    engine: Engine,
    op: Op,
    x: Array,
    reduction: AnyReduction,
    root: int,
    algorithm: str | Schedule | None,
) -> Call:
    """Prepares the call of an all_reduce, reduce, scan or exscan with any reduction."""
    if not callable(reduction):
        return collective_calls.in_place(engine, op, x, reduction, root, algorithm)
    engine.call_cache.check_root(op, root)
    exchange, texts = _exchange(engine, op, reduction, x, root, algorithm)
    gather = Op.GATHER if op is Op.REDUCE else Op.ALL_GATHER
    receives = gather is Op.ALL_GATHER or engine.rank == root
    rows = empty_like(x, (engine.size, *x.shape)) if receives else None
    folded = {Op.SCAN: engine.rank + 1, Op.EXSCAN: engine.rank}.get(op, engine.size)

    def complete() -> None:
        if rows is not None and folded > 0:  # rank 0 of an exscan has nothing to fold
            assign(x, _fold(engine, reduction, _each(rows)[:folded]))

    gathering = collective_calls.gathering(engine, gather, x, rows, root, None)
    dtype = dtype_of(x)
    nbytes = math.prod(x.shape) * dtype.size_bytes
    counted_as = CallRequest(op, (nbytes,), dtype, root=root)
    gathering = gathering._replace(result=x, complete=complete)
    later = LaterUse.of(x, x if receives else None)
    return _after(engine, exchange, texts, gathering, later, counted_as)


def reduce_scatter(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | None,
    reduction: AnyReduction,
    algorithm: str | Schedule | None,
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """Makes a reduce_scatter with any reduction. Error texts name `lengths_from` as the origin of
    the lengths.
    """
    if not callable(reduction):
        return collective_calls.scattering(
            engine, Op.REDUCE_SCATTER, x, out, -1, reduction, algorithm, lengths_from=lengths_from
        )
    several = isinstance(x, (list, tuple))
    pieces = stage_pieces(x, engine.size, writable=False, what="x") if several else []
    share = share_of(x, engine.size, engine.rank) if out is None else out
    mine: Any = x[engine.rank] if several else x
    expected = math.prod(mine.shape) // (1 if several else engine.size)
    if math.prod(share.shape) != expected or share.dtype != mine.dtype:
        raise ValueError(
            f"reduce_scatter: out has {math.prod(share.shape)} elements of {share.dtype}, but the "
            f"share of rank {engine.rank} is {expected} elements of {mine.dtype}"
        )
    exchange, texts = _exchange(engine, Op.REDUCE_SCATTER, reduction, mine, -1, algorithm)
    rows: Any = empty_like(mine, (engine.size, *share.shape))

    def complete() -> None:
        assign(share, _fold(engine, reduction, _each(rows)))

    dtype = dtype_of(mine)
    if several:
        lengths = tuple(piece.located[1] for piece in pieces)
        exchanging = collective_calls.all_to_all(
            engine, x, _each(rows), None, lengths * engine.size
        )
    else:
        lengths = (expected * dtype.size_bytes,) * engine.size
        exchanging = collective_calls.all_to_all(engine, x, rows, None)
    counted_as = CallRequest(Op.REDUCE_SCATTER, lengths, dtype)
    exchanging = exchanging._replace(result=share, complete=complete)
    later = LaterUse.of(x, share)
    return _after(engine, exchange, texts, exchanging, later, counted_as)


def _each(rows: Array) -> list[Array]:
    """Returns a view of each rank's contribution, also for arrays without dimensions."""
    return [rows[rank, ...] for rank in range(len(rows))]


def _fold(engine: Engine, function: Function, contributions: list[Array]) -> Array:
    """Returns f(... f(f(x_0, x_1), x_2) ..., x_n-1). If f raises an error, aborts the group with
    this error as the cause.
    """
    acc = contributions[0]
    shape, dtype = tuple(acc.shape), acc.dtype
    try:
        for x in contributions[1:]:
            acc = function(acc, x)
            found = tuple(getattr(acc, "shape", ())), getattr(acc, "dtype", type(acc).__name__)
            if found != (shape, dtype):
                raise TypeError(
                    f"expected an array of shape {shape} and type {dtype} as its result, not of "
                    f"shape {found[0]} and type {found[1]}"
                )
    except Exception as error:
        engine.group.abort(
            f"rank {engine.rank}: the reduction {_name_of(function)} raised "
            f"{type(error).__name__}: {error}"
        )
        raise
    return acc


def _exchange(
    engine: Engine,
    op: Op,
    function: Function,
    x: Array,
    root: int,
    algorithm: str | Schedule | None,
) -> tuple[Call, NDArray[np.uint8]]:
    """Returns a call that gathers each rank's call as a text, and the array that receives the
    texts. The ranks then compare the texts.
    """
    if algorithm is not None:
        raise UnsupportedError(
            f"algorithm={algorithm!r} cannot run {_name_of(function)}: give no algorithm with a "
            "function, since the ranks gather its arguments"
        )
    staged = stage(x, writable=False)
    count = f"[{staged.count}]" if op is not Op.REDUCE_SCATTER else ""
    where = f", root={root}" if root >= 0 else ""
    text = f"{op}({_name_of(function)}, {staged.dtype.name.lower()}{count}{where})"
    mine = np.zeros(_CALL_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_CALL_BYTES], np.uint8)
    mine[: encoded.size] = encoded
    texts = np.empty((engine.size, _CALL_BYTES), np.uint8)
    return collective_calls.gathering(engine, Op.ALL_GATHER, mine, texts, -1, None), texts


def _after(
    engine: Engine,
    exchange: Call,
    texts: NDArray[np.uint8],
    call: Call,
    later: LaterUse,
    counted_as: CallRequest,
) -> Call:
    """Returns a call that runs `exchange`, then `call`. The counters record `call` as `counted_as`.

    Raises `MismatchError` if the exchanged texts differ. Functions are compared by name only.
    """
    exchange = exchange._replace(prepared=made_internal(exchange.prepared))
    volume = engine.call_cache.volume(counted_as)
    call = call._replace(prepared=call.prepared.with_volume(volume))

    def proceed() -> Call:
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in texts]
        if len(set(calls)) > 1:
            each = ", ".join(f"rank {rank} called {made}" for rank, made in enumerate(calls))
            engine.disagree(f"the ranks disagree: {each}")
        return call

    return followed_by(exchange, proceed, later, call.result)


def _name_of(function: Function) -> str:
    """Returns module and qualified name of a function, which the ranks compare."""
    named = function if hasattr(function, "__name__") else type(function)
    name = getattr(named, "__qualname__", getattr(named, "__name__", ""))
    return f"{getattr(named, '__module__', None) or 'builtins'}.{name}"
