"""Collectives in place: one array is input and output.

The functions are methods of `Communicator`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.communicator import collective_calls, python_reductions
from unisono.communicator.arrays import Array
from unisono.communicator.python_reductions import AnyReduction
from unisono.execution import OP_CODES
from unisono.schedule import Schedule
from unisono.types import Op

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_ALL_REDUCE = OP_CODES[Op.ALL_REDUCE]
_BROADCAST = OP_CODES[Op.BROADCAST]
_REDUCE = OP_CODES[Op.REDUCE]
_SCAN = OP_CODES[Op.SCAN]
_EXSCAN = OP_CODES[Op.EXSCAN]


def all_reduce(
    self: Communicator,
    x: Array,
    op: AnyReduction = "sum",
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces `x` over all ranks, in place on all ranks. Returns `x`.

    `op` is one of:

    - "sum", "prod", "min", "max", "avg". Sums of 16- and 8-bit floats accumulate in float32 and
      are rounded once. If a contribution is NaN, "min" and "max" give NaN.
    - For integers and booleans "band", "bor", "bxor".
    - For truth values "land", "lor", "lxor": 0 is false, all else is true, results are 0 or 1.
    - For pairs of value and index (`unisono.pairs`) "minloc", "maxloc": the pair with the
      extreme value; of equal values, the lowest index.
    - `unisono.premul_sum(factor)`: multiplies each rank's `x` by that rank's factor before the
      sum.
    - A function f(a, b) that returns an array like its two arguments. Python calls it in rank
      order. It must be associative but need not commute. It is slow: every rank gathers all
      contributions and folds them. An error in the function aborts the group.

    `algorithm` is one of `unisono.algorithms.names("all_reduce")`, or a `Schedule`. With None,
    the library chooses.
    """
    if (done := self._quick(_ALL_REDUCE, x, x, op, -1, algorithm, async_op)) is not None:
        return done
    return self._engine.collective(
        "all_reduce", async_op, python_reductions.in_place, Op.ALL_REDUCE, x, op, -1, algorithm
    )


def reduce(
    self: Communicator,
    x: Array,
    root: int = 0,
    op: AnyReduction = "sum",
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces `x` over all ranks, in place on `root`. On other ranks `x` does not change."""
    if (done := self._quick(_REDUCE, x, x, op, root, algorithm, async_op)) is not None:
        return done
    return self._engine.collective(
        "reduce", async_op, python_reductions.in_place, Op.REDUCE, x, op, root, algorithm
    )


def broadcast(
    self: Communicator,
    x: Array,
    root: int = 0,
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Copies `x` of `root` to `x` of all ranks. Returns `x`."""
    if (done := self._quick(_BROADCAST, x, x, "sum", root, algorithm, async_op)) is not None:
        return done
    return self._engine.collective(
        "broadcast", async_op, collective_calls.in_place, Op.BROADCAST, x, "sum", root, algorithm
    )


def scan(
    self: Communicator,
    x: Array,
    op: AnyReduction = "sum",
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces `x` over this rank and all ranks below it, in place. Returns `x`.

    `op` is as for `all_reduce`, without "avg".
    """
    if (done := self._quick(_SCAN, x, x, op, -1, algorithm, async_op)) is not None:
        return done
    return self._engine.collective(
        "scan", async_op, python_reductions.in_place, Op.SCAN, x, op, -1, algorithm
    )


def exscan(
    self: Communicator,
    x: Array,
    op: AnyReduction = "sum",
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces `x` over all ranks below this rank, in place. Returns `x`.

    Rank 0 has no rank below it, so its `x` does not change. `op` is as for `all_reduce`, without
    "avg".
    """
    if (done := self._quick(_EXSCAN, x, x, op, -1, algorithm, async_op)) is not None:
        return done
    return self._engine.collective(
        "exscan", async_op, python_reductions.in_place, Op.EXSCAN, x, op, -1, algorithm
    )
