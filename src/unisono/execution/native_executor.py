"""Loads execution plans into the C++ executor, once per kind of call."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unisono import algorithms, native
from unisono.algorithms import Hosts
from unisono.bootstrap import NO_SINGLE_COPY, SingleCopyRules, StagingShape
from unisono.errors import UnsupportedError
from unisono.schedule import Code, ExecutionPlan, Schedule, check, coarsen, lower_rank, to_json
from unisono.types import DType, LengthsFrom, Op, ReduceOp, StorePolicy

OP_CODES = {op: code for code, op in enumerate(Op)}
_SPLIT_CODE = len(OP_CODES)
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 32 << 10, 256 << 10
_LEAST_SPANNING_BYTES, _MOST_SPANNING_BYTES = 64 << 10, 512 << 10
_MOST_ADOPTED = 256
UNTOLD = (1 << 64) - 1
"""The `count` of a call in which the ranks exchange their counts."""
_BLOCK_UNIT_BYTES = 4096  # a whole number of elements of every type, and of cache lines


def block_bytes_for(
    slots: Sequence[int],
    depth: int,
    area_bytes: int,
    *,
    wanted: int | None = None,
    spans: bool = False,
) -> int:
    """Returns the wanted block size, or one for which all ranks' staging fits in a third of the
    cache, within bounds. Between hosts, returns one whose transfer takes longer than a check of the
    network.

    `slots` holds the number of staging slots of each rank, `depth` is the number of blocks in
    flight, and `area_bytes` is the staging memory of a rank for one block. Raises
    `UnsupportedError` if the block does not fit there.

    >>> block_bytes_for([4, 4, 4, 4], depth=2, area_bytes=1 << 17) >> 10  # a quarter per slot
    32
    """
    target = 0.3 * native.last_level_cache_bytes() / ((sum(slots) + len(slots)) * depth)
    power = 1 << (max(int(target), 1).bit_length() - 1)
    block = min(max(power, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
    if spans:
        block = _MOST_SPANNING_BYTES
    most = area_bytes // max(1, *slots)
    if most < _BLOCK_UNIT_BYTES:
        raise UnsupportedError(
            f"{max(slots)} slots need {max(slots) * _BLOCK_UNIT_BYTES} bytes of staging per rank "
            f"and block, the group has {area_bytes}: raise UNISONO_STAGING_BYTES"
        )
    most = most // _BLOCK_UNIT_BYTES * _BLOCK_UNIT_BYTES
    if wanted is None:
        return min(block, most)
    if wanted % _BLOCK_UNIT_BYTES or not 0 < wanted <= most:
        raise UnsupportedError(
            f"block_bytes: expected a multiple of {_BLOCK_UNIT_BYTES} up to {most} (the size of "
            f"one of {max(slots)} slots under UNISONO_STAGING_BYTES), got {wanted}"
        )
    return wanted


def several_blocks(part_bytes: int, lead: int, least_bytes: int, most_bytes: int) -> int:
    """Returns a block size that divides a part into enough blocks for rounds to run ahead, within
    bounds.

    >>> several_blocks(1 << 20, 2, 64 << 10, 512 << 10) >> 10
    172
    """
    several = -(-part_bytes // (2 * lead + 2) // _BLOCK_UNIT_BYTES) * _BLOCK_UNIT_BYTES
    return min(max(several, least_bytes), most_bytes)


def spanning_block_bytes(schedule: Schedule, longest_bytes: int, shape: StagingShape) -> int:
    """Returns the block size of a call on several hosts, given the length of its longest part."""
    lowered = lower_rank(schedule, 0)
    most = block_bytes_for(lowered.slots, shape.depth, shape.area_bytes, spans=True)
    least = min(_LEAST_SPANNING_BYTES, most)
    part_bytes = longest_bytes // lowered.plan.parts
    return several_blocks(part_bytes, shape.depth - 2, least, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlan:
    """A plan in the executor's form, with its properties."""

    native: native.Plan
    name: str
    pieces_in: int
    pieces_out: int
    block_bytes: int
    reduce_depth: int
    in_rank_order: bool
    uniform: bool
    in_place: bool
    lends: bool = False
    parts: int = 1
    lead: int = 0
    """Number of blocks by which the first round of the schedule runs ahead of the last."""
    least_block_bytes: int | None = None
    """Smallest block; blocks between this and `block_bytes` are small enough for rounds to run
    ahead. None: always `block_bytes`."""
    lending: LoadedPlan | None = None
    """The single-copy plan of the same schedule: ranks read each other's memory instead of
    slots."""

    def block_for(self, longest_bytes: int) -> int:
        """Returns the block size of a call, given the longest piece of all ranks."""
        if self.least_block_bytes is None:
            return self.block_bytes
        part_bytes = longest_bytes // self.parts
        return several_blocks(part_bytes, self.lead, self.least_block_bytes, self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments on which the ranks of a call must agree. `count` is the caller's number of
    elements."""

    op: Op
    dtype: DType
    reduction: ReduceOp = ReduceOp.SUM
    root: int = -1
    count: int
    lengths: tuple[int, ...] = ()
    caller_dtype: DType | None = None
    """Type of the caller's elements, if `dtype` is the type of a wider copy."""
    others: tuple[int, ...] = ()
    """Further values that must be equal."""
    reproducible: bool = False
    lengths_from: LengthsFrom = LengthsFrom.NONE
    """Source of `lengths` in errors; the only field that may differ between ranks."""
    splits: bool = False
    """Whether the call is part of splitting a group: the program made no other call."""


class NativeExecutor:
    """Loads algorithms as plans of one rank of a group, and binds arguments to them."""

    def __init__(
        self,
        group: native.Group,
        rank: int,
        stores: StorePolicy,
        hosts: Hosts | None = None,
        reach: Callable[[set[int]], None] | None = None,
        lending: SingleCopyRules = NO_SINGLE_COPY,
    ) -> None:
        """`hosts` holds the ranks of each host (None: all ranks are on one).

        `reach` is called for each plan on several hosts, with the ranks with which this rank
        exchanges data. `lending` says which calls use single copy.
        """
        self._group = group
        self._hosts = hosts
        self._reach = reach
        self._rank = rank
        self._stores = stores
        self.lending = lending
        self._plans: dict[tuple[Op, str, int, int | None], LoadedPlan] = {}
        # By identity, because hashing a large schedule takes longer than a small call; and by name,
        # which contains a hash, so that equal schedules share a plan.
        self._known: dict[int, tuple[Schedule, str]] = {}
        self._adopted: dict[str, Schedule] = {}

    def adopt(self, schedule: Schedule) -> str:
        """Checks a schedule of the caller, unless it is known; returns its name in this executor.

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
        # held, so that no other object gets its identity
        self._known[id(schedule)] = schedule, name
        return name

    def plan(self, op: Op, algorithm: str, root: int, block_bytes: int | None = None) -> LoadedPlan:
        """Returns this rank's plan, lowered at the first request. Raises `UnsupportedError`.

        `block_bytes` is a multiple of 4096. None: as in the algorithm's string, else from the size
        of the caches.
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
        plan = self._make(schedule, op, algorithm, root, block_bytes)
        if op not in self.lending.pieces:  # rare, and lowering takes time
            return plan
        lending = self._make(schedule, op, algorithm, root, block_bytes, lends=True)
        # Calls of all other operations are, or may be, in place; all_to_all copies then.
        usable = lending.in_place or op is Op.ALL_TO_ALL
        return replace(plan, lending=lending) if usable else plan

    def _make(
        self,
        schedule: Schedule,
        op: Op,
        algorithm: str,
        root: int,
        block_bytes: int | None,
        *,
        lends: bool = False,
    ) -> LoadedPlan:
        ranks = self._group.ranks
        lowered = lower_rank(schedule, self._rank, lends=lends)
        if self._reach is not None:
            self._reach(partners(lowered.plan))
        slots = list(lowered.slots)
        pieces_in, pieces_out = piece_counts(op, ranks, self._rank, root)
        spans = self._hosts is not None
        if lowered.plan.loans_only and lends:
            most_bytes = block_bytes or self.lending.block_bytes
        else:
            most_bytes = block_bytes_for(
                slots, self._group.depth, self._group.area_bytes, wanted=block_bytes, spans=spans
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
            least_block_bytes=min(_LEAST_SPANNING_BYTES, most_bytes) if adapts else None,
            reduce_depth=lowered.plan.reduce_depth,
            in_rank_order=lowered.in_rank_order,
            uniform=lowered.uniform,
            in_place=lowered.in_place,
            lends=lends,
        )

    def serving(self, plan: LoadedPlan, op: Op, longest_bytes: int) -> LoadedPlan:
        """Returns the plan or its single-copy form, given the longest piece of a call."""
        if plan.lending is None or not self.lending.serves(op, longest_bytes):
            return plan
        return plan.lending

    def prepare(
        self, plan: LoadedPlan, args: Arguments, *, piece_bytes: int = 0
    ) -> native.Prepared:
        """Returns a call without its memory; `piece_bytes` is the length of equal pieces."""
        longest_bytes = max(piece_bytes, *args.lengths, 0)
        plan = self.serving(plan, args.op, longest_bytes)
        rest = f"{args.lengths}/{args.others}/{args.reproducible}/{plan.lends}"
        block_bytes = plan.block_for(longest_bytes)
        agreed = f"{plan.name}/{block_bytes}/{rest}".encode()
        return native.Prepared(
            plan=plan.native,
            op=_SPLIT_CODE if args.splits else OP_CODES[args.op],
            dtype=args.dtype,
            reduction=args.reduction,
            root=args.root,
            count=args.count,
            extra=zlib.crc32(agreed),
            block_bytes=block_bytes,
            piece_bytes=piece_bytes,
            longest_bytes=longest_bytes,
            policy=self._stores,
            caller_dtype=args.caller_dtype,
            lead=plan.lead,
            lengths_from=args.lengths_from,
        )


def partners(plan: ExecutionPlan) -> set[int]:
    """Returns the ranks whose slots a rank reads, and the readers of its own slots."""
    table = plan.table
    sources = table["peer"][table["code"] == Code.WAIT].tolist()
    return {*sources, *(reader.rank for reader in plan.readers)}


def _check_fit(schedule: Schedule, op: Op, ranks: int, root: int) -> None:
    """Raises `UnsupportedError` if a schedule is for another call."""
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
        loans_only=plan.loans_only,
    )
