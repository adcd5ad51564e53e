"""Prepares plans for the C++ executor, once per kind of call."""

from __future__ import annotations

import functools
import hashlib
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from unisono import algorithms, native
from unisono.algorithms import Hosts
from unisono.bootstrap import NO_SINGLE_COPY, SingleCopyRules, StagingShape
from unisono.errors import UnsupportedError
from unisono.execution.block_sizes import LEAST_SPANNING_BYTES, block_bytes_for, several_blocks
from unisono.schedule import (
    Code,
    ExecutionPlan,
    RankPlan,
    Schedule,
    check,
    coarsen,
    lower_rank,
    to_json,
)
from unisono.types import DType, LengthsFrom, Op, ReduceOp, StorePolicy

OP_CODES = {op: code for code, op in enumerate(Op)}
_INTERNAL_CODES = {name: len(OP_CODES) + i for i, name in enumerate(("split", "window"))}
"""Codes of the calls that only the library makes, as in `csrc/core/call.h`."""
_MOST_ADOPTED = 256
UNKNOWN_COUNT = (1 << 64) - 1
"""Value of `count` for a call in which the ranks exchange their counts."""
_UNCOUNTED = (0, 0, 0, 0)
_WITHOUT_HEAP = (Op.BARRIER, Op.SCATTER)
"""Operations without a form for shared heaps: some of their ranks have no array to share."""
_HEAP_BLOCK_BYTES, _FORWARDED_BLOCK_BYTES = 16 << 20, 512 << 10
"""Bytes of a block of arrays in shared heaps: as long as possible, because nothing is staged. If
ranks forward what they have received, blocks are so short that they are still in the cache.
"""
_LEAST_HEAP_BYTES, _LEAST_CROWDED_HEAP_BYTES = 4 << 10, 32 << 10
"""Minimum bytes of a piece that ranks access in shared heaps, with a core for each rank and with
fewer cores. Smaller pieces cost less in slots, because the owner need not wait for its readers.
"""


def spanning_block_bytes(schedule: Schedule, longest_bytes: int, shape: StagingShape) -> int:
    """Returns the block size of a call on several hosts, given the bytes of its longest piece."""
    lowered = lower_rank(schedule, 0)
    most = block_bytes_for(lowered.slots, shape.depth, shape.buffer_bytes, spans=True)
    least = min(LEAST_SPANNING_BYTES, most)
    part_bytes = longest_bytes // lowered.plan.parts
    return several_blocks(part_bytes, shape.depth - 2, least, most)


class Form(Enum):
    """Memory in which ranks read the data of other ranks: slots (STAGED), the other rank's memory
    by a system call (SINGLE_COPY), or the other rank's shared heap (HEAP).
    """

    STAGED = "staged"
    SINGLE_COPY = "single copy"
    HEAP = "heap"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlan:
    """A plan in the executor's form, with the properties that its callers need."""

    native: native.Plan
    name: str
    pieces_in: int
    pieces_out: int
    block_bytes: int
    reduce_depth: int
    in_rank_order: bool
    uniform: bool
    in_place: bool
    form: Form = Form.STAGED
    parts: int = 1
    lead: int = 0
    """Number of blocks by which the first round of the schedule runs ahead of the last round."""
    least_block_bytes: int | None = None
    """Minimum bytes of a block, if small messages are cut into smaller blocks: the first rounds of
    a block then overlap the last rounds of the block before. None: blocks always have
    `block_bytes`.
    """
    single_copy_plan: LoadedPlan | None = None
    """The plan of the same schedule with single copy."""
    shares_input: bool = False
    shares_output: bool = False
    heap_plan: Callable[[], LoadedPlan | None] = lambda: None
    """Returns the plan of the same schedule for arrays in the ranks' shared heaps, if any."""

    def block_for(self, longest_bytes: int) -> int:
        """Returns the block size of a call, given the bytes of the longest piece of all ranks."""
        if self.least_block_bytes is None:
            return self.block_bytes
        part_bytes = longest_bytes // self.parts
        return several_blocks(part_bytes, self.lead, self.least_block_bytes, self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments that must be equal on all ranks. `count` is the caller's number of elements."""

    op: Op
    dtype: DType
    reduction: ReduceOp = ReduceOp.SUM
    root: int = -1
    count: int
    lengths: tuple[int, ...] = ()
    caller_dtype: DType | None = None
    """The type of the caller's elements, if `dtype` is the type of a wider copy."""
    others: tuple[int, ...] = ()
    """Further numbers that must be equal on all ranks, such as the lengths of packed arrays."""
    reproducible: bool = False
    lengths_from: LengthsFrom = LengthsFrom.NONE
    """The argument that `lengths` come from, which error texts name. It may differ between
    ranks.
    """
    made_for: str = ""
    """The method for which the library makes this call, `split` or `window`; errors name it."""


class NativeExecutor:
    """Loads algorithms as plans of one rank of a group, and binds arguments to the plans."""

    def __init__(
        self,
        group: native.Group,
        rank: int,
        stores: StorePolicy,
        hosts: Hosts | None = None,
        reach: Callable[[set[int]], None] | None = None,
        single_copy_rules: SingleCopyRules = NO_SINGLE_COPY,
        *,
        cores: int = 1,
    ) -> None:
        """`hosts` are the ranks of each host (None: a single host). If there are several hosts,
        `reach` is called when a plan is made, with the ranks that exchange data with this rank.
        `single_copy_rules` determine which calls use single copy. `cores` is the number of cores of
        rank 0."""
        self._group = group
        self._hosts = hosts
        self._reach = reach
        self.rank = rank
        self._stores = stores
        self.single_copy_rules = single_copy_rules
        crowded = group.ranks > cores
        self._least_heap_bytes = _LEAST_CROWDED_HEAP_BYTES if crowded else _LEAST_HEAP_BYTES
        self._plans: dict[tuple[Op, str, int, int | None], LoadedPlan] = {}
        # Known schedules by `id()`, because hashing a large schedule takes longer than a small
        # call. Equal schedules share a name, which contains a hash of the content.
        self._known: dict[int, tuple[Schedule, str]] = {}
        self._adopted: dict[str, Schedule] = {}

    def adopt(self, schedule: Schedule) -> str:
        """Proves that a caller's schedule is right, unless the schedule is known. Returns its name
        in this executor.

        Raises `ScheduleError`.
        """
        known = self._known.get(id(schedule))
        if known is not None:
            return known[1]
        digest = hashlib.sha256(to_json(schedule).encode()).hexdigest()[:16]
        name = f"{schedule.algorithm}@{digest}"
        if name not in self._adopted:
            adopted = coarsen(schedule)
            check(adopted)
            self._adopted[name] = adopted
        if len(self._known) >= _MOST_ADOPTED:
            self._known.clear()
        # keeps the schedule alive, so that its id stays unique
        self._known[id(schedule)] = schedule, name
        return name

    def plan(self, op: Op, algorithm: str, root: int, block_bytes: int | None = None) -> LoadedPlan:
        """Returns the plan of this rank; makes it at the first request. Raises `UnsupportedError`.

        `block_bytes` is a multiple of 4096. None means the value in the algorithm's string, else a
        value that suits the caches.
        """
        key = (op, algorithm, root, block_bytes)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._load(op, algorithm, root, block_bytes)
        return found

    def _load(self, op: Op, algorithm: str, root: int, block_bytes: int | None) -> LoadedPlan:
        ranks = self._group.ranks
        schedule = self._adopted.get(algorithm)
        if schedule is None:
            schedule = algorithms.build(
                op, algorithm, ranks=ranks, root=max(root, 0), hosts=self._hosts
            )
            block_bytes = block_bytes or algorithms.block_bytes(op, algorithm)
        else:
            _check_fit(schedule, op, ranks, root)
        # A weak reference, because the executor keeps its plans: a cycle would keep the group, with
        # its descriptors, until the garbage collector runs.
        method = weakref.WeakMethod(self._make)
        make = functools.partial(_called, method, schedule, op, algorithm, root, block_bytes)
        plan = make(Form.STAGED)
        if self._group.heap_bytes > 0 and op not in _WITHOUT_HEAP:
            make_heap_plan = functools.partial(_in_place, make, op, Form.HEAP)
            plan = replace(plan, heap_plan=functools.cache(make_heap_plan))
        if op in self.single_copy_rules.pieces:
            plan = replace(plan, single_copy_plan=_in_place(make, op, Form.SINGLE_COPY))
        return plan

    def _make(
        self,
        schedule: Schedule,
        op: Op,
        algorithm: str,
        root: int,
        block_bytes: int | None,
        form: Form,
    ) -> LoadedPlan:
        ranks = self._group.ranks
        lowered = lower_rank(
            schedule,
            self.rank,
            shares_memory=form is not Form.STAGED,
            may_write_back=form is Form.HEAP,
            hosts=self._hosts,
        )
        if self._reach is not None:
            self._reach(partners(lowered.plan))
        slots = list(lowered.slots)
        pieces_in, pieces_out = piece_counts(op, ranks, self.rank, root)
        spans = self._hosts is not None
        if lowered.plan.addresses_only and form is not Form.STAGED:
            most_bytes = block_bytes or self._usual_block_bytes(lowered, form)
        else:
            most_bytes = block_bytes_for(
                slots, self._group.depth, self._group.buffer_bytes, wanted=block_bytes, spans=spans
            )
        adapts = spans and block_bytes is None
        return LoadedPlan(
            native=_to_native(lowered.plan, slots, pieces_in, pieces_out),
            name=algorithm,
            pieces_in=pieces_in,
            pieces_out=pieces_out,
            block_bytes=most_bytes,
            parts=lowered.plan.parts,
            lead=self._group.depth - 2 if spans else 0,
            least_block_bytes=min(LEAST_SPANNING_BYTES, most_bytes) if adapts else None,
            reduce_depth=lowered.plan.reduce_depth,
            in_rank_order=lowered.in_rank_order,
            uniform=lowered.uniform,
            in_place=lowered.in_place,
            form=form,
            shares_input=lowered.shares_input,
            shares_output=lowered.shares_output,
        )

    def _usual_block_bytes(self, lowered: RankPlan, form: Form) -> int:
        if form is Form.SINGLE_COPY:
            return self.single_copy_rules.block_bytes
        forwards = lowered.plan.rounds > 1 and not lowered.writes_back
        return _FORWARDED_BLOCK_BYTES if forwards else _HEAP_BLOCK_BYTES

    def serving(self, plan: LoadedPlan, op: Op, longest_bytes: int) -> LoadedPlan:
        """Returns the single-copy plan of `plan` if a call whose longest piece has `longest_bytes`
        uses single copy according to the rules, else `plan`.
        """
        if plan.single_copy_plan is None or not self.single_copy_rules.serves(op, longest_bytes):
            return plan
        return plan.single_copy_plan

    def prepare(
        self,
        plan: LoadedPlan,
        args: Arguments,
        *,
        piece_bytes: int = 0,
        volume: tuple[int, int, int, int] = _UNCOUNTED,
    ) -> native.Prepared:
        """Returns a call that lacks only its memory. `piece_bytes` is the length of each piece if
        all are equally long.

        `volume` has the amounts that the call adds to the counters: row, calls, bytes sent, bytes
        received.
        """
        longest_bytes = max(piece_bytes, *args.lengths, 0)
        heap_plan = plan.heap_plan() if piece_bytes >= self._least_heap_bytes else None
        plan = self.serving(plan, args.op, longest_bytes)
        block_bytes = plan.block_for(longest_bytes)
        return native.Prepared(
            plan=plan.native,
            op=_INTERNAL_CODES.get(args.made_for, OP_CODES[args.op]),
            dtype=args.dtype,
            reduction=args.reduction,
            root=args.root,
            count=args.count,
            extra=_extra(plan, block_bytes, args),
            block_bytes=block_bytes,
            piece_bytes=piece_bytes,
            longest_bytes=longest_bytes,
            policy=self._stores,
            caller_dtype=args.caller_dtype,
            lead=plan.lead,
            lengths_from=args.lengths_from,
            volume=volume,
            heap_form=None if heap_plan is None else _heap_form(heap_plan, args, longest_bytes),
        )


def _called(method: weakref.WeakMethod[Callable[..., LoadedPlan]], *arguments: Any) -> LoadedPlan:
    """Calls a method of an executor, which lives as long as its plans are used."""
    make = method()
    assert make is not None
    return make(*arguments)


def _extra(plan: LoadedPlan, block_bytes: int, args: Arguments) -> int:
    """Returns a hash of the values that must be equal on all ranks and that `Prepared` does not
    have.
    """
    rest = f"{args.lengths}/{args.others}/{args.reproducible}/{plan.form.value}"
    return zlib.crc32(f"{plan.name}/{block_bytes}/{rest}".encode())


def _heap_form(
    plan: LoadedPlan, args: Arguments, longest_bytes: int
) -> tuple[native.Plan, int, int, bool, bool]:
    block_bytes = plan.block_for(longest_bytes)
    extra = _extra(plan, block_bytes, args)
    return plan.native, extra, block_bytes, plan.shares_input, plan.shares_output


def _in_place(make: Callable[[Form], LoadedPlan], op: Op, form: Form) -> LoadedPlan | None:
    """Returns the plan with which ranks read each other's memory. Returns None in two cases: the
    plan would be wrong for a call whose input and output are the same array, or all ranks would
    read only slots.
    """
    plan = make(form)
    if not (plan.shares_input or plan.shares_output):
        return None
    # An all_to_all copies its input if input and output are the same array.
    return plan if plan.in_place or op is Op.ALL_TO_ALL else None


def partners(plan: ExecutionPlan) -> set[int]:
    """Returns the ranks whose slots this rank reads, and the ranks that read this rank's slots."""
    table = plan.table
    sources = table["peer"][table["code"] == Code.WAIT].tolist()
    return {*sources, *(reader.rank for reader in plan.readers)}


def _check_fit(schedule: Schedule, op: Op, ranks: int, root: int) -> None:
    """Raises `UnsupportedError` if a schedule is for another operation, number of ranks or root."""
    made = schedule.collective
    if (made.op, made.ranks, made.root) != (op, ranks, root if op.rooted else None):
        of, to = (f" with root {r}" if op.rooted else "" for r in (made.root, root))
        raise UnsupportedError(
            f"{schedule.algorithm} is a schedule of {made.op} on {made.ranks} ranks{of}; "
            f"this is {op} on {ranks} ranks{to}"
        )


def piece_counts(op: Op, ranks: int, rank: int, root: int) -> tuple[int, int]:
    """Returns the numbers of input and output pieces of a rank."""
    many_in = op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL) or (op is Op.SCATTER and rank == root)
    many_out = op in (Op.ALL_GATHER, Op.ALL_TO_ALL) or (op is Op.GATHER and rank == root)
    if op is Op.BARRIER:
        return 0, 0
    return (ranks if many_in else 1), (ranks if many_out else 1)


def _to_native(
    plan: ExecutionPlan, slots: list[int], pieces_in: int, pieces_out: int
) -> native.Plan:
    return native.Plan(
        packed=plan.pack(),
        readers=plan.pack_readers(),
        rank=plan.rank,
        ranks=plan.ranks,
        pieces_in=pieces_in,
        pieces_out=pieces_out,
        parts=plan.parts,
        stages=plan.stages,
        rounds=plan.rounds,
        slots=slots,
        scratch=plan.num_tmp,
        addresses_only=plan.addresses_only,
    )
