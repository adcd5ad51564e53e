"""From what a caller asks to a call that the executor runs: choose, check, remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from unisono import native
from unisono.communicator.selection import Rule, Selection
from unisono.errors import UnsupportedError
from unisono.runtime.native_executor import Arguments, LoadedPlan, NativeExecutor
from unisono.types import DType, Op, ReduceOp

Key: TypeAlias = tuple[Op, int, int, ReduceOp, int, "str | None"]
"""Operation, bytes of the caller's larger buffer, type, reduction, root, algorithm."""

_MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that serves a call, and the rule that chose it (None: the caller did)."""

    plan: LoadedPlan
    rule: Rule | None


def parse_reduction(op: str | ReduceOp) -> ReduceOp:
    """A reduction by its name. Raises `UnsupportedError` listing the names.

    >>> parse_reduction("avg")
    <ReduceOp.AVG: 4>
    """
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp[op.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(reduction.name.lower() for reduction in ReduceOp)
        raise UnsupportedError(
            f"there is no reduction {op!r}; the reductions are {known}"
        ) from None


class CallBook:
    """Calls of one communicator, prepared once for each kind."""

    def __init__(self, executor: NativeExecutor, ranks: int, selection: Selection) -> None:
        self._executor = executor
        self._ranks = ranks
        self._selection = selection
        self._remembered: dict[Key, native.Prepared] = {}
        self.find = self._remembered.get

    def choose(self, op: Op, nbytes: int, root: int, algorithm: str | None) -> Choice:
        """The plan for a call of `nbytes` in the caller's larger buffer."""
        if op is Op.BARRIER:
            return Choice(plan=self._executor.plan(op, "direct", -1), rule=None)
        if algorithm is not None:
            return Choice(plan=self._executor.plan(op, algorithm, root), rule=None)
        rule = self._selection.choose(op, nbytes)
        return Choice(plan=self._executor.plan(op, rule.algorithm, root), rule=rule)

    def check(self, op: Op, dtype: DType, reduction: ReduceOp, root: int) -> None:
        """Raises `UnsupportedError` or `ValueError` for what no plan can serve."""
        if op.reduces and not dtype.supports(reduction):
            raise UnsupportedError(
                f"{dtype.name.lower()} has no reduction {reduction.name.lower()}"
            )
        if op.rooted and not 0 <= root < self._ranks:
            raise ValueError(f"root {root} is not one of the {self._ranks} ranks of this group")

    def needs_widening(self, plan: LoadedPlan, dtype: DType, reduction: ReduceOp) -> bool:
        """Whether 16-bit floats would be rounded at each of several nested reductions."""
        exact = reduction in (ReduceOp.MIN, ReduceOp.MAX)
        return dtype.is_narrow_float and plan.reduce_depth > 1 and not exact

    def prepare(self, key: Key, plan: LoadedPlan) -> native.Prepared:
        """The call of equal pieces that `key` describes, remembered."""
        op, nbytes, dtype_code, reduction, root, _ = key
        dtype = DType(dtype_code)
        piece = nbytes // self._ranks
        many = op in (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)
        prepared = self._executor.prepare(
            plan,
            Arguments(
                op=op,
                dtype=dtype,
                reduction=reduction,
                root=root,
                count=nbytes // dtype.size_bytes,
            ),
            in_bytes=piece if many else nbytes,
            out_bytes=piece if many else nbytes,
        )
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[key] = prepared
        return prepared

    def prepare_uneven(
        self,
        op: Op,
        dtype: DType,
        reduction: ReduceOp,
        root: int,
        lengths: tuple[int, ...],
        algorithm: str | None,
    ) -> native.Prepared:
        """A call whose pieces have these lengths in bytes; all ranks know them all."""
        choice = self.choose(op, sum(lengths), root, algorithm)
        if choice.plan.uniform and len(set(lengths)) > 1:
            raise UnsupportedError(f"{choice.plan.name} needs pieces of one length")
        args = Arguments(
            op=op,
            dtype=dtype,
            reduction=reduction,
            root=root,
            count=sum(lengths) // dtype.size_bytes,
            lengths=lengths,
        )
        return self._executor.prepare(choice.plan, args)
