"""From what a caller asks to a call that the executor runs: choose, check, remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from unisono import native
from unisono.communicator.premul import PremulSum
from unisono.communicator.selection import Rule, Selection
from unisono.errors import UnsupportedError
from unisono.runtime.native_executor import Arguments, LoadedPlan, NativeExecutor
from unisono.schedule import Schedule
from unisono.types import DType, Op, ReduceOp

_MOST_REMEMBERED = 4096
_SHARED = (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)


class Request(NamedTuple):
    """All that the ranks of a call must agree on.

    `lengths` are the bytes of each piece: one for an operation in place, one per rank where the
    larger buffer has a piece for each, all pairs of an uneven all_to_all. `caller_dtype` is the
    type of the caller's elements where `dtype` is that of a wider copy.
    """

    op: Op
    lengths: tuple[int, ...]
    dtype: DType
    reduction: ReduceOp = ReduceOp.SUM
    root: int = -1
    algorithm: str | None = None
    caller_dtype: DType | None = None

    @property
    def even(self) -> bool:
        """Whether all pieces have one length."""
        return len(set(self.lengths)) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that serves a call, and the rule that chose it (None: the caller did)."""

    plan: LoadedPlan
    rule: Rule | None


def parse_reduction(op: str | ReduceOp | PremulSum) -> ReduceOp:
    """A reduction by its name. Raises `UnsupportedError` listing the names.

    >>> parse_reduction("avg")
    <ReduceOp.AVG: 4>
    """
    if isinstance(op, PremulSum):
        return ReduceOp.PREMUL_SUM
    try:
        found = op if isinstance(op, ReduceOp) else ReduceOp[op.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(reduction.name.lower() for reduction in ReduceOp)
        raise UnsupportedError(f"no reduction {op!r}; the reductions are {known}") from None
    if found is ReduceOp.PREMUL_SUM:
        raise UnsupportedError("premul_sum needs a factor: op=unisono.premul_sum(0.5)")
    return found


class CallBook:
    """Calls of one communicator, prepared once for each request."""

    def __init__(self, executor: NativeExecutor, ranks: int, selection: Selection) -> None:
        self._executor = executor
        self._ranks = ranks
        self._selection = selection
        self._remembered: dict[Request, native.Prepared] = {}

    def name(self, algorithm: str | Schedule | None) -> str | None:
        """What requests call an algorithm; a schedule of the caller's is proved and remembered.

        Raises `ScheduleError` when it is wrong.
        """
        if isinstance(algorithm, Schedule):
            return self._executor.adopt(algorithm)
        return algorithm

    def choose(self, op: Op, nbytes: int, root: int = -1, algorithm: str | None = None) -> Choice:
        """The plan for a call of `nbytes` in the caller's larger buffer."""
        if algorithm is not None:
            return Choice(plan=self._executor.plan(op, algorithm, root), rule=None)
        rule = self._selection.choose(op, nbytes)
        return Choice(plan=self._executor.plan(op, rule.algorithm, root), rule=rule)

    def check(self, request: Request) -> None:
        """Raises `UnsupportedError` or `ValueError` for what no plan can serve."""
        op, dtype, reduction = request.op, request.dtype, request.reduction
        if op.reduces and not dtype.supports(reduction):
            served = ", ".join(r.name.lower() for r in ReduceOp if dtype.supports(r))
            raise UnsupportedError(
                f"{dtype.name.lower()} has no reduction {reduction.name.lower()}; it has {served}"
            )
        if op.scans and reduction is ReduceOp.AVG:
            raise UnsupportedError(f"{op} has no reduction avg: take sum, and divide by your count")
        if op.rooted and not 0 <= request.root < self._ranks:
            raise ValueError(
                f"root {request.root} is not one of the {self._ranks} ranks of this group"
            )
        if op.rooted and not request.even:
            raise ValueError(f"{op}: all pieces must have one length, not {request.lengths} bytes")

    def widens(self, request: Request) -> bool:
        """Whether narrow floats would be rounded more than once: at each of several nested
        reductions, or already when they are multiplied."""
        if not (request.op.reduces and request.dtype.is_narrow_float):
            return False
        if request.reduction is ReduceOp.PREMUL_SUM:
            return True
        return self._plan(request).reduce_depth > 1 and not request.reduction.selects

    def call(self, request: Request) -> native.Prepared:
        """The prepared call. Raises `UnsupportedError` or `ValueError`."""
        found = self._remembered.get(request)
        if found is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            found = self._remembered[request] = self._prepare(request)
        return found

    def _plan(self, request: Request) -> LoadedPlan:
        return self.choose(request.op, sum(request.lengths), request.root, request.algorithm).plan

    def _prepare(self, request: Request) -> native.Prepared:
        self.check(request)
        plan = self._plan(request)
        if plan.uniform and not request.even:
            raise UnsupportedError(f"{plan.name} needs pieces of one length")
        total = sum(request.lengths)
        piece = total // self._ranks if request.op in _SHARED else total
        return self._executor.prepare(
            plan,
            Arguments(
                op=request.op,
                dtype=request.dtype,
                reduction=request.reduction,
                root=request.root,
                count=total // request.dtype.size_bytes,
                lengths=() if request.even else request.lengths,
                caller_dtype=request.caller_dtype,
            ),
            piece_bytes=piece if request.even else 0,
        )
