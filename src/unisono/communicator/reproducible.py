"""Algorithms that a reproducible communicator may run: every element of the result is a fold of the
contributions in rank order.

The bits of an element then depend only on its contributions and their ranks. They do not depend on
message length, position in the message, algorithm or hosts. This holds for any kind of link, since
only a plan's order of operands determines a fold. An algorithm that first reduces within each host
nests reductions, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.execution import LoadedPlan, NativeExecutor
from unisono.selection import Rule, SelectedRule
from unisono.types import Op

FALLBACK = "direct"
"""Name of an algorithm that serves every operation: after one exchange, each receiver folds in rank
order.
"""

_SOURCE = "reproducible=True"


def is_reproducible(plan: LoadedPlan, *, narrow: bool) -> bool:
    """Returns True if a reproducible communicator may run the plan. `narrow` is True for 16- and
    8-bit floats.

    A fold that continues on other ranks gives the same bits as a fold on one rank, except for
    narrow floats. Such plans reduce float32 copies of narrow floats, and a copy can change the bits
    of a NaN that no addition changes.
    """
    return plan.in_rank_order and not (narrow and plan.reduce_depth > 1)


def fallback(op: Op) -> SelectedRule:
    """Returns the rule for calls whose usual algorithm is not reproducible."""
    return SelectedRule(rule=Rule(op=op, algorithm=FALLBACK), source=_SOURCE)


def refusal(
    executor: NativeExecutor, op: Op, algorithm: str, root: int, *, narrow: bool
) -> UnsupportedError:
    """Returns an error with the reason of the refusal and the permitted algorithms."""
    kind = " of 16- and 8-bit floats" if narrow else ""
    return UnsupportedError(
        f"algorithm={algorithm!r}: expected an algorithm that folds {op}{kind} in rank order, "
        "since this communicator is reproducible: "
        f"{', '.join(_allowed(executor, op, root, narrow=narrow))}"
    )


def _allowed(executor: NativeExecutor, op: Op, root: int, *, narrow: bool) -> Iterator[str]:
    for name in algorithms.names(op):
        try:
            plan = executor.plan(op, name, root)
        except UnsupportedError:
            continue  # the algorithm does not serve this number of ranks
        if is_reproducible(plan, narrow=narrow):
            yield name
