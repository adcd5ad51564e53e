"""Reductions that the program brings: a Python function, called in the order of ranks.

The slow way, and the only one that calls back into Python: contributions are gathered whole and
folded by the rank that wants the result. All else goes to `exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.communicator import collectives
from unisono.communicator.arrays import Array, assign, empty, stage, stage_pieces
from unisono.communicator.collectives import Reduction
from unisono.communicator.count_exchange import followed
from unisono.communicator.engine import Call, Engine
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
    """all_reduce, reduce, scan and exscan by any reduction."""
    if not callable(reduction):
        return collectives.in_place(engine, op, x, reduction, root, algorithm)
    engine.book.check_root(op, root)
    exchange, told = _name_exchange(engine, op, reduction, x, root, algorithm)
    gather = Op.GATHER if op is Op.REDUCE else Op.ALL_GATHER
    receives = gather is Op.ALL_GATHER or engine.rank == root
    rows = empty(x, (engine.size, *x.shape)) if receives else None
    folded = {Op.SCAN: engine.rank + 1, Op.EXSCAN: engine.rank}.get(op, engine.size)

    def complete() -> None:
        if rows is not None and folded > 0:  # below rank 0 there is nothing to fold
            assign(x, _fold(engine, reduction, _each(rows)[:folded]))

    gathering = collectives.gathering(engine, gather, x, rows, root, None)
    return _after(engine, exchange, told, gathering._replace(result=x, complete=complete))


def reduce_scatter(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | None,
    reduction: AnyReduction,
    algorithm: str | Schedule | None,
    lengths_from: LengthsFrom = LengthsFrom.NONE,
) -> Call:
    """reduce_scatter by any reduction; `lengths_from` as for `exchange.scattering`."""
    if not callable(reduction):
        return collectives.scattering(
            engine, Op.REDUCE_SCATTER, x, out, -1, reduction, algorithm, lengths_from=lengths_from
        )
    several = isinstance(x, (list, tuple))
    pieces = stage_pieces(x, engine.size, writable=False, what="x") if several else []
    share = collectives.share_of(x, engine.size, engine.rank) if out is None else out
    mine: Any = x[engine.rank] if several else x
    expected = math.prod(mine.shape) // (1 if several else engine.size)
    if math.prod(share.shape) != expected or share.dtype != mine.dtype:
        raise ValueError(
            f"reduce_scatter: out has {math.prod(share.shape)} elements of {share.dtype}, but the "
            f"share of rank {engine.rank} is {expected} elements of {mine.dtype}"
        )
    exchange, told = _name_exchange(engine, Op.REDUCE_SCATTER, reduction, mine, -1, algorithm)
    rows: Any = empty(mine, (engine.size, *share.shape))

    def complete() -> None:
        assign(share, _fold(engine, reduction, _each(rows)))

    if several:
        lengths = tuple(piece.located[1] for piece in pieces) * engine.size
        exchanging = collectives.all_to_all(engine, x, _each(rows), None, lengths)
    else:
        exchanging = collectives.all_to_all(engine, x, rows, None)
    return _after(engine, exchange, told, exchanging._replace(result=share, complete=complete))


def _each(rows: Array) -> list[Array]:
    """The contribution of each rank; a view, of an array without dimensions too."""
    return [rows[rank, ...] for rank in range(len(rows))]


def _fold(engine: Engine, function: Function, contributions: list[Array]) -> Array:
    """f(... f(f(x_0, x_1), x_2) ..., x_n-1). An error ends the group, with its cause."""
    acc = contributions[0]
    shape, dtype = tuple(acc.shape), acc.dtype
    try:
        for x in contributions[1:]:
            acc = function(acc, x)
            found = tuple(getattr(acc, "shape", ())), getattr(acc, "dtype", type(acc).__name__)
            if found != (shape, dtype):
                raise TypeError(
                    f"it must return an array of shape {shape} and type {dtype}, not of shape "
                    f"{found[0]} and type {found[1]}"
                )
    except Exception as error:
        engine.group.abort(
            f"rank {engine.rank}: the reduction {_name_of(function)} raised "
            f"{type(error).__name__}: {error}"
        )
        raise
    return acc


def _name_exchange(
    engine: Engine,
    op: Op,
    function: Function,
    x: Array,
    root: int,
    algorithm: str | Schedule | None,
) -> tuple[Call, NDArray[np.uint8]]:
    """The call in which the ranks tell each other what they call, and where it is told."""
    if algorithm is not None:
        raise UnsupportedError(
            f"algorithm={algorithm!r} cannot run {_name_of(function)}: a function is called on "
            "contributions that were gathered"
        )
    staged = stage(x, writable=False)
    count = f"[{staged.count}]" if op is not Op.REDUCE_SCATTER else ""
    where = f", root={root}" if root >= 0 else ""
    text = f"{op}({_name_of(function)}, {staged.dtype.name.lower()}{count}{where})"
    mine = np.zeros(_CALL_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_CALL_BYTES], np.uint8)
    mine[: encoded.size] = encoded
    told = np.empty((engine.size, _CALL_BYTES), np.uint8)
    return collectives.gathering(engine, Op.ALL_GATHER, mine, told, -1, None), told


def _after(engine: Engine, exchange: Call, told: NDArray[np.uint8], call: Call) -> Call:
    """The call, unless ranks call different functions, as far as names tell: `MismatchError`."""

    def proceed() -> Call:
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in told]
        if len(set(calls)) > 1:
            each = ", ".join(f"rank {rank} called {made}" for rank, made in enumerate(calls))
            engine.disagree(f"the ranks disagree: {each}")
        return call

    return followed(exchange, proceed, call.result)


def _name_of(function: Function) -> str:
    """What tells a function from others on other ranks: its module and qualified name."""
    named = function if hasattr(function, "__name__") else type(function)
    name = getattr(named, "__qualname__", getattr(named, "__name__", ""))
    return f"{getattr(named, '__module__', None) or 'builtins'}.{name}"
