"""Prepared calls: chooses the algorithm of a request, checks it, and caches the result."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from unisono import native
from unisono.algorithms import Hosts
from unisono.communicator.arguments import check_rank
from unisono.communicator.call_volume import CallVolume, internal_volume, made_internal, volume_of
from unisono.communicator.premul import PremulSum
from unisono.communicator.reproducible import fallback, is_reproducible, refusal
from unisono.errors import UnsupportedError
from unisono.execution import UNKNOWN_COUNT, Arguments, LoadedPlan, NativeExecutor
from unisono.schedule import Schedule
from unisono.selection import Demands, SelectedRule, SelectionTable
from unisono.types import DType, LengthsFrom, Op, ReduceOp

_MOST_REMEMBERED = 4096  # number of calls; a call with uneven pieces counts once per piece
_FLOAT32_BYTES = 4
_VOTE_BYTES = 8
_ALSO = {"product": "prod", "average": "avg"}
SHARED = (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)
"""Operations whose larger buffer has one piece for each rank."""


class CallRequest(NamedTuple):
    """All values of a call that must be equal on all ranks, and `lengths_from`, which only error
    texts use.

    `lengths` are the bytes of each piece. An operation in place has one piece. An operation whose
    larger buffer is split among the ranks has one piece per rank; an uneven all_to_all has one per
    pair of ranks. `caller_dtype` is the caller's element type if `dtype` is the type of a wider
    copy. `packed` are the lengths of several arrays that are packed into one buffer.
    """

    op: Op
    lengths: tuple[int, ...]
    dtype: DType
    reduction: ReduceOp = ReduceOp.SUM
    root: int = -1
    algorithm: str | None = None
    caller_dtype: DType | None = None
    packed: tuple[int, ...] = ()
    lengths_from: LengthsFrom = LengthsFrom.NONE

    @property
    def even(self) -> bool:
        """True if all pieces have the same length."""
        return len(set(self.lengths)) <= 1

    @property
    def narrow(self) -> bool:
        """True if the caller's elements are 16- or 8-bit floats."""
        return (self.caller_dtype or self.dtype).is_narrow_float


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """The plan for a call, and the rule that selected it. The rule is None if the caller named the
    algorithm.
    """

    plan: LoadedPlan
    selected: SelectedRule | None


def parse_reduction(op: str | ReduceOp | PremulSum) -> ReduceOp:
    """Returns the reduction with this name. Raises `UnsupportedError`, which lists the names.

    >>> parse_reduction("avg"), parse_reduction("product")
    (<ReduceOp.AVG: 4>, <ReduceOp.PROD: 1>)
    """
    if isinstance(op, PremulSum):
        return ReduceOp.PREMUL_SUM
    try:
        found = op if isinstance(op, ReduceOp) else ReduceOp[_ALSO.get(op.lower(), op).upper()]
    except (KeyError, AttributeError):
        known = ", ".join(reduction.name.lower() for reduction in ReduceOp)
        raise UnsupportedError(f"op: expected one of {known}, not {op!r}") from None
    if found is ReduceOp.PREMUL_SUM:
        raise UnsupportedError("premul_sum needs a factor: op=unisono.premul_sum(0.5)")
    return found


def common_name(op: str | ReduceOp) -> str:
    """Returns the usual name of a reduction. Returns an unknown name unchanged.

    >>> common_name("AVERAGE"), common_name("median")
    ('avg', 'median')
    """
    try:
        return parse_reduction(op).name.lower()
    except UnsupportedError:
        return str(op)


class CallCache:
    """The calls of one communicator. Each request is prepared once.

    `hosts` are the ranks of each host (None: all ranks are on one host). With `reproducible`, calls
    use only algorithms that fold in rank order: see `reproducible.py`.
    """

    def __init__(
        self,
        executor: NativeExecutor,
        ranks: int,
        table: SelectionTable,
        *,
        hosts: Hosts | None = None,
        reproducible: bool = False,
    ) -> None:
        self.hosts: Hosts = hosts or (tuple(range(ranks)),)
        self._reproducible = reproducible
        self._executor = executor
        self._ranks = ranks
        self.table = table
        self._remembered: dict[Hashable, native.Prepared] = {}
        self._free = _MOST_REMEMBERED

    def name(self, algorithm: str | Schedule | None) -> str | None:
        """Returns the name by which requests refer to the algorithm. If the caller gave a schedule,
        proves that it is right and stores it.

        Raises `ScheduleError` for a wrong schedule and `TypeError` for other objects.
        """
        if isinstance(algorithm, Schedule):
            return self._executor.adopt(algorithm)
        if algorithm is None or isinstance(algorithm, str):
            return algorithm
        raise TypeError(f"algorithm: expected a name or a Schedule, not {algorithm!r}")

    def choose(
        self,
        op: Op,
        nbytes: int,
        root: int = -1,
        algorithm: str | None = None,
        dtype_bytes: int | None = None,
        narrow: bool = False,
    ) -> AlgorithmChoice:
        """Chooses the plan for a call whose larger buffer (input or output) has `nbytes`.

        `narrow` is True for 16- and 8-bit floats. Raises `UnsupportedError` if the algorithm is not
        permitted or cannot serve the call; the text states whether the caller or a rule chose the
        algorithm.
        """
        if algorithm is not None:
            plan = self._executor.plan(op, algorithm, root)
            if self._reproducible and not is_reproducible(plan, narrow=narrow):
                raise refusal(self._executor, op, algorithm, root, narrow=narrow)
            return AlgorithmChoice(plan=plan, selected=None)
        widening = _FLOAT32_BYTES // (dtype_bytes or _FLOAT32_BYTES) if narrow else 1
        selected = self.table.choose(
            op,
            nbytes,
            ranks=self._ranks,
            hosts=self.hosts,
            dtype_bytes=dtype_bytes,
            demands=Demands(in_rank_order=self._reproducible, widening=widening),
        )
        plan = self._chosen(op, root, selected)
        if self._reproducible and not is_reproducible(plan, narrow=narrow):
            selected = fallback(op)
            plan = self._chosen(op, root, selected)
        return AlgorithmChoice(plan=plan, selected=selected)

    def form(self, choice: AlgorithmChoice, op: Op, nbytes: int) -> LoadedPlan:
        """Returns the chosen plan or its single-copy variant, whichever serves a call with equal
        pieces.
        """
        piece_bytes = nbytes // self._ranks if op in SHARED else nbytes
        return self._executor.serving(choice.plan, op, piece_bytes)

    def _chosen(self, op: Op, root: int, selected: SelectedRule) -> LoadedPlan:
        rule = selected.rule
        try:
            return self._executor.plan(op, rule.algorithm, root, rule.block_bytes)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} (chosen by {selected.source}: {rule})") from error

    def check(self, request: CallRequest) -> None:
        """Raises `UnsupportedError` or `ValueError` if no plan can serve the request."""
        op, dtype, reduction = request.op, request.dtype, request.reduction
        if op.reduces and not dtype.supports(reduction):
            served = ", ".join(r.name.lower() for r in ReduceOp if dtype.supports(r))
            raise UnsupportedError(
                f"{dtype.name.lower()} does not support {reduction.name.lower()}; it supports "
                f"{served}"
            )
        if op.scans and reduction is ReduceOp.AVG:
            raise UnsupportedError(f"{op} does not support avg: use sum and divide by the count")
        self.check_root(op, request.root)

    def check_root(self, op: Op, root: int) -> None:
        """Raises `ValueError` unless the root is a rank of the group, `TypeError` unless it is an
        integer.
        """
        if op.rooted:
            check_rank(root, self._ranks, "root")

    def widens(self, request: CallRequest) -> bool:
        """Returns True if the plan would round narrow floats more than once.

        This happens if a rounded partial result is reduced again, or if contributions are
        multiplied before the reduction.
        """
        if not (request.op.reduces and request.dtype.is_narrow_float):
            return False
        if request.reduction is ReduceOp.PREMUL_SUM:
            return True
        return self._plan(request).reduce_depth > 1 and not request.reduction.selects

    def call(self, request: CallRequest) -> native.Prepared:
        """Returns the prepared call. Raises `UnsupportedError` or `ValueError`."""
        found = self._remembered.get(request)
        if found is None:
            found = self._prepare(request)
            self._remember(request, found, 1 if request.even else len(request.lengths))
        return found

    def barrier(self) -> native.Prepared:
        """Returns the barrier as a prepared call.

        Over several hosts the barrier is an all_reduce of no elements. In an all_reduce every
        contribution reaches every rank, so no rank leaves before all have arrived.
        """
        if len(self.hosts) == 1:
            return self.call(CallRequest(Op.BARRIER, (), DType.UINT8))
        key = Op.BARRIER
        found = self._remembered.get(key)
        if found is None:
            found = self._executor.prepare(
                self.choose(Op.ALL_REDUCE, 0).plan,
                Arguments(op=Op.BARRIER, dtype=DType.UINT8, count=0),
                volume=self.volume(CallRequest(Op.BARRIER, (), DType.UINT8)),
            )
            self._remember(key, found, 1)
        return found

    def exchange(self, op: Op, dtype: DType, root: int, nbytes: int) -> native.Prepared:
        """Returns the call that exchanges counts before `op`: each rank sends its `nbytes` of
        counts to all ranks.
        """
        key = (op, dtype, root, nbytes)
        found = self._remembered.get(key)
        if found is None:
            found = self._executor.prepare(
                self._executor.plan(Op.ALL_GATHER, "direct", -1),
                Arguments(
                    op=op,
                    dtype=DType.INT64,
                    root=root,
                    count=UNKNOWN_COUNT,
                    caller_dtype=dtype,
                ),
                piece_bytes=nbytes,
                volume=internal_volume(nbytes, ranks=self._ranks),
            )
            self._remember(key, found, 1)
        return found

    def own_exchange(self, made_for: str, nbytes: int) -> native.Prepared:
        """Returns the call that exchanges data for the method `made_for`, such as `split`: each
        rank sends `nbytes` to all ranks.
        """
        plan = self.choose(Op.ALL_GATHER, nbytes * self._ranks).plan
        args = Arguments(op=Op.ALL_GATHER, dtype=DType.UINT8, count=nbytes, made_for=made_for)
        volume = internal_volume(nbytes, ranks=self._ranks)
        return self._executor.prepare(plan, args, piece_bytes=nbytes, volume=volume)

    def vote(self) -> native.Prepared:
        """Returns the call that reduces the votes of all ranks, one int64 each, to their
        minimum.
        """
        key = "vote"
        found = self._remembered.get(key)
        if found is None:
            request = CallRequest(Op.ALL_REDUCE, (_VOTE_BYTES,), DType.INT64, ReduceOp.MIN)
            found = made_internal(self.call(request))
            self._remember(key, found, 1)
        return found

    def volume(self, request: CallRequest) -> CallVolume:
        """Returns the amounts that the call adds to the counters of this rank."""
        return volume_of(request, rank=self._executor.rank, ranks=self._ranks)

    def check_uneven(self, op: Op, root: int, algorithm: str | Schedule | None) -> None:
        """Raises `UnsupportedError` if the algorithm cannot serve pieces of different lengths."""
        name = self.name(algorithm)
        if name is not None:
            self._require_uneven(self._executor.plan(op, name, root))

    def _remember(self, key: Hashable, call: native.Prepared, weight: int) -> None:
        self._free -= weight
        if self._free < 0:
            self._remembered.clear()
            self._free = _MOST_REMEMBERED - weight
        self._remembered[key] = call

    def _require_uneven(self, plan: LoadedPlan) -> None:
        if plan.uniform:
            raise UnsupportedError(
                f"{plan.name} needs pieces of one length, since a rank forwards pieces whose "
                f"lengths it cannot know"
            )

    def _plan(self, request: CallRequest) -> LoadedPlan:
        plan = self.choose(
            request.op,
            sum(request.lengths),
            request.root,
            request.algorithm,
            request.dtype.size_bytes,
            request.narrow,
        ).plan
        if plan.uniform and not request.even and request.algorithm is None:
            return self._executor.plan(request.op, "direct", request.root)
        return plan

    def _prepare(self, request: CallRequest) -> native.Prepared:
        self.check(request)
        plan = self._plan(request)
        if not request.even:
            self._require_uneven(plan)
        total = sum(request.lengths)
        piece = total // self._ranks if request.op in SHARED else total
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
                others=request.packed,
                reproducible=self._reproducible,
                lengths_from=request.lengths_from,
            ),
            piece_bytes=piece if request.even else 0,
            volume=self.volume(request),
        )
