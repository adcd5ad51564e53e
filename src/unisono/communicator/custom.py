"""Reductions that the program brings: a Python function, called in the order of ranks.

The slow way, and the only one that calls back into Python: contributions are gathered whole and
folded by the rank that wants the result. All else goes to `exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from unisono.communicator import exchange
from unisono.communicator.arrays import Array, assign, empty, stage
from unisono.communicator.engine import Engine
from unisono.communicator.exchange import Reduction
from unisono.communicator.work import Work
from unisono.errors import MismatchError, UnsupportedError
from unisono.schedule import Schedule
from unisono.types import Op

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
    async_op: bool,
) -> Any:
    """all_reduce and reduce by any reduction."""
    if not callable(reduction):
        return exchange.in_place(engine, op, x, reduction, root, algorithm, async_op)
    receives = op is Op.ALL_REDUCE or engine.rank == root
    _agree(engine, op, reduction, x, root, algorithm)
    rows = empty(x, (engine.size, *x.shape)) if receives else None
    gather = Op.ALL_GATHER if op is Op.ALL_REDUCE else Op.GATHER
    gathered = exchange.gathering(engine, gather, x, rows, root, None, async_op)

    def complete() -> None:
        if rows is not None:
            assign(x, _fold(engine, reduction, _each(rows)))

    return _then(gathered, complete, x, async_op)


def reduce_scatter(
    engine: Engine,
    x: Array | Sequence[Array],
    out: Array | None,
    reduction: AnyReduction,
    algorithm: str | Schedule | None,
    async_op: bool,
) -> Any:
    """reduce_scatter by any reduction."""
    if not callable(reduction):
        return exchange.scattering(
            engine, Op.REDUCE_SCATTER, x, out, -1, reduction, algorithm, async_op
        )
    several = isinstance(x, (list, tuple))
    share = exchange.share_of(x, engine.size, engine.rank) if out is None else out
    mine: Any = x[engine.rank] if several else x
    expected = math.prod(mine.shape) // (1 if several else engine.size)
    if math.prod(share.shape) != expected or share.dtype != mine.dtype:
        raise ValueError(
            f"reduce_scatter: out has {math.prod(share.shape)} elements of {share.dtype}, but the "
            f"share of rank {engine.rank} is {expected} elements of {mine.dtype}"
        )
    _agree(engine, Op.REDUCE_SCATTER, reduction, mine, -1, algorithm)
    rows: Any = empty(mine, (engine.size, *share.shape))
    exchanged = exchange.all_to_all(engine, x, _each(rows) if several else rows, None, async_op)

    def complete() -> None:
        assign(share, _fold(engine, reduction, _each(rows)))

    return _then(exchanged, complete, share, async_op)


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


def _agree(
    engine: Engine,
    op: Op,
    function: Function,
    x: Array,
    root: int,
    algorithm: str | Schedule | None,
) -> None:
    """Raises `MismatchError` where ranks call different functions, as far as names tell."""
    if algorithm is not None:
        raise UnsupportedError(
            f"algorithm={algorithm!r} cannot run {_name_of(function)}: a function is called on "
            "contributions that were gathered"
        )
    staged = stage(x, writable=False)
    count = f"[{staged.count}]" if op is not Op.REDUCE_SCATTER else ""
    where = f", root={root}" if root >= 0 else ""
    text = f"{op}({_name_of(function)}, {staged.dtype.name.lower()}{count}{where})"
    told = np.zeros(_CALL_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_CALL_BYTES], np.uint8)
    told[: encoded.size] = encoded
    table = exchange.gathering(engine, Op.ALL_GATHER, told, None, -1, None, False)
    calls = [
        row.tobytes().rstrip(b"\0").decode(errors="replace")
        for row in table.reshape(engine.size, _CALL_BYTES)
    ]
    if len(set(calls)) > 1:
        each = ", ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls))
        disagreement = f"the ranks disagree: {each}"
        engine.group.fail_mismatch(disagreement)
        raise MismatchError(disagreement)


def _name_of(function: Function) -> str:
    """What tells a function from others on other ranks: its module and qualified name."""
    named = function if hasattr(function, "__name__") else type(function)
    name = getattr(named, "__qualname__", getattr(named, "__name__", ""))
    return f"{getattr(named, '__module__', None) or 'builtins'}.{name}"


def _then(begun: Any, complete: Callable[[], None], result: Array, async_op: bool) -> Any:
    """The result, when what was begun has come in; with `async_op` when it is waited for."""
    if async_op:
        return FoldingWork(begun, result, complete)
    complete()
    return result


class FoldingWork(Work):
    """Contributions under way; they are folded in the thread that waits for them."""

    def __init__(self, gathered: Work, result: Any, complete: Callable[[], None]) -> None:
        super().__init__(result, complete)
        self._gathered = gathered

    def _wait_native(self, timeout_s: float | None) -> bool:
        return self._gathered._wait_native(timeout_s)

    def is_completed(self) -> bool:
        return self._gathered.is_completed()

    def exception(self) -> Exception | None:
        return self._gathered.exception()
