"""What a reproducible communicator may run: every element one fold in the order of ranks.

Then the bits of an element depend on the contributions and on the numbers of the ranks alone: not
on the length of the message, on its place in it, on the algorithm or on the hosts. That holds for
links to come too, as long as a plan's order of operands is all that decides a fold; an algorithm
that first reduces within each host nests reductions, and is refused like any other that does.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.execution import LoadedPlan, NativeExecutor
from unisono.selection import Rule, SelectedRule
from unisono.types import Op

FALLBACK = "direct"
"""Serves every operation with one exchange, folded in rank order where it arrives."""

_SOURCE = "reproducible=True"


def is_reproducible(plan: LoadedPlan, *, narrow: bool) -> bool:
    """Whether the plan may run; `narrow` for elements that are 16- and 8-bit floats.

    A fold that goes on at other ranks gives the bits of a fold at once, except for narrow floats:
    for those the whole vector then goes through float32 copies, which leaves no trace but in a NaN
    that nothing was added to.
    """
    return plan.in_rank_order and not (narrow and plan.reduce_depth > 1)


def fallback(op: Op) -> SelectedRule:
    """What serves calls whose usual algorithm is not reproducible."""
    return SelectedRule(rule=Rule(op=op, algorithm=FALLBACK), source=_SOURCE)


def refusal(
    executor: NativeExecutor, op: Op, algorithm: str, root: int, *, narrow: bool
) -> UnsupportedError:
    """Why an algorithm may not run, and which may."""
    kind = " of 16- and 8-bit floats" if narrow else ""
    return UnsupportedError(
        f"algorithm={algorithm!r}: this communicator is reproducible, but {op}{kind} by it does "
        "not fold every element once in the order of ranks, so its bits depend on message size "
        f"and algorithm; {', '.join(_allowed(executor, op, root, narrow=narrow))} do"
    )


def _allowed(executor: NativeExecutor, op: Op, root: int, *, narrow: bool) -> Iterator[str]:
    for name in algorithms.names(op):
        try:
            plan = executor.plan(op, name, root)
        except UnsupportedError:
            continue  # not on this many ranks
        if is_reproducible(plan, narrow=narrow):
            yield name
