"""Replay plans symbolically, several blocks through bounded slots: the proof of `lower`.

Waiting for a number that only grows gives the same outcome in whatever order the ranks run, so
one order shows whether they can get stuck. What may be read when must not depend on the order,
though: each rank carries a vector clock that only POST and WAIT pass on, and a slot may be read
only if its writing is in the reader's clock, and overwritten only if all readings of it are in
the writer's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.errors import ScheduleError
from unisono.schedule.collective import Collective
from unisono.schedule.plan import Plan
from unisono.schedule.record import Code, Flag, Record, Ref, Space

Content = tuple[int, int]
"""(chunk, mask of contributing ranks)"""


@dataclass(slots=True, kw_only=True)
class _Slot:
    content: Content
    block: int
    written: int
    reads: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Rank:
    plan: Plan
    records: Sequence[Record]
    clock: list[int]
    pc: int = 0
    block: int = 0
    entered: bool = False
    memory: dict[Ref, Content] = field(default_factory=dict)
    posted: list[int] = field(default_factory=list)
    post_clocks: list[tuple[int, ...]] = field(default_factory=list)


def check_plans(
    collective: Collective, plans: Sequence[Plan], *, depth: int = 1, blocks: int = 3
) -> None:
    """Prove that the plans never get stuck, never race, and perform the collective.

    Each rank owns `depth` blocks' worth of slots. Raises `ScheduleError`, naming the rank, the
    record and the block.
    """
    _Replay(collective, plans, depth, blocks).run()


class _Replay:
    def __init__(
        self, collective: Collective, plans: Sequence[Plan], depth: int, blocks: int
    ) -> None:
        self.collective = collective
        self.depth = depth
        self.blocks = blocks
        self.ranks = [
            _Rank(plan=plan, records=tuple(plan.records), clock=[0] * collective.ranks)
            for plan in plans
        ]
        self.slots: dict[tuple[Ref, int], _Slot] = {}
        stages = {plan.stages for plan in plans}
        if len(stages) != 1:
            raise ScheduleError(f"plans have different numbers of stages: {sorted(stages)}")
        self.stages = stages.pop()
        for rank in self.ranks:
            self._check_last(rank.plan)
            rank.memory = self._inputs(rank.plan.rank)

    def run(self) -> None:
        """Run every rank as far as it gets, until all are done or none can go on."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.block < self.blocks and self._step(rank):
                    moved = True
        stuck = [rank for rank in self.ranks if rank.block < self.blocks]
        if stuck:
            raise ScheduleError("deadlock: " + "; ".join(self._where(rank) for rank in stuck))

    def _step(self, rank: _Rank) -> bool:
        if not rank.entered:
            if not self._enter(rank):
                return False
            rank.entered = True
        record = rank.records[rank.pc]
        rank.clock[rank.plan.rank] += 1
        if record.code is Code.WAIT:
            if not self._join(rank, record.peer, rank.block * self.stages + record.value):
                return False
        elif record.code is Code.POST:
            self._post(rank, record)
        elif record.code is not Code.ARG:
            self._move(rank, record)
        rank.pc += 1
        if rank.pc == len(rank.records):
            self._end_block(rank)
        return True

    def _enter(self, rank: _Rank) -> bool:
        """A block reuses the slots of `depth` blocks ago, which everyone must have finished."""
        if rank.plan.num_slots == 0:
            return True
        need = (rank.block - self.depth + 1) * self.stages
        others = [r.plan.rank for r in self.ranks if r is not rank]
        return need <= 0 or all(self._join(rank, peer, need) for peer in others)

    def _join(self, rank: _Rank, peer: int, need: int) -> bool:
        """Learn what the peer knew at its first post of at least `need`."""
        other = self.ranks[peer]
        at = bisect_left(other.posted, need)
        if at == len(other.posted):
            return False
        theirs = other.post_clocks[at]
        if rank.clock[peer] < theirs[peer]:  # else it learned all this through others already
            rank.clock = [a if a > b else b for a, b in zip(rank.clock, theirs, strict=True)]
        return True

    def _post(self, rank: _Rank, record: Record) -> None:
        value = rank.block * self.stages + record.value
        if rank.posted and value <= rank.posted[-1]:
            raise ScheduleError(f"{self._where(rank)}: progress does not grow")
        rank.posted.append(value)
        rank.post_clocks.append(tuple(rank.clock))

    def _move(self, rank: _Rank, record: Record) -> None:
        if record.code is Code.COPY:
            content = self._read(rank, record.src)
        else:
            args = rank.records[rank.pc + 1 : rank.pc + 1 + record.nsrc]
            if len(args) < record.nsrc or any(arg.code is not Code.ARG for arg in args):
                raise ScheduleError(f"{self._where(rank)}: lacks its {record.nsrc} operands")
            content = self._fold(rank, [self._read(rank, arg.src) for arg in args])
            final = content[1] == (1 << self.collective.ranks) - 1
            if final != bool(record.flags & Flag.FINAL):
                raise ScheduleError(f"{self._where(rank)}: the FINAL flag is wrong")
        self._store(rank, record.dst, content)
        if record.flags & Flag.HAS_DST2:
            self._store(rank, record.dst2, content)

    def _fold(self, rank: _Rank, contents: list[Content]) -> Content:
        chunk, mask = contents[0]
        for other, more in contents[1:]:
            if other != chunk or mask & more:
                raise ScheduleError(f"{self._where(rank)}: operands do not add up")
            mask |= more
        return chunk, mask

    def _read(self, rank: _Rank, ref: Ref) -> Content:
        if ref.space is not Space.SLOT:
            if ref not in rank.memory:
                raise ScheduleError(f"{self._where(rank)}: {_text(ref)} holds nothing")
            return rank.memory[ref]
        slot = self.slots.get((ref, rank.block % self.depth))
        if slot is None or slot.block != rank.block or slot.written > rank.clock[ref.rank]:
            raise ScheduleError(
                f"{self._where(rank)}: {_text(ref)} may be read before it is written"
            )
        slot.reads[rank.plan.rank] = rank.clock[rank.plan.rank]
        return slot.content

    def _store(self, rank: _Rank, ref: Ref, content: Content) -> None:
        me = rank.plan.rank
        if ref.rank != me or ref.space is Space.IN:
            raise ScheduleError(f"{self._where(rank)}: {_text(ref)} is not its to write")
        if ref.space is not Space.SLOT:
            rank.memory[ref] = content
            return
        if ref.index >= rank.plan.num_slots:
            raise ScheduleError(f"{self._where(rank)}: has {rank.plan.num_slots} slots")
        key = ref, rank.block % self.depth
        old = self.slots.get(key)
        if old is not None:
            if old.block == rank.block:
                raise ScheduleError(f"{self._where(rank)}: {_text(ref)} is written twice")
            late = [r for r, read in old.reads.items() if read > rank.clock[r]]
            if late:
                raise ScheduleError(
                    f"{self._where(rank)}: {_text(ref)} may be overwritten while rank "
                    f"{late[0]} reads it"
                )
        self.slots[key] = _Slot(content=content, block=rank.block, written=rank.clock[me])

    def _end_block(self, rank: _Rank) -> None:
        me = rank.plan.rank
        for chunk, contributors in self.collective.expected(me).items():
            ref = self.collective.output_ref(me, chunk)
            assert ref is not None
            out = Ref(space=Space.OUT, rank=me, index=ref[0], part=ref[1])
            want = chunk, sum(1 << r for r in contributors)
            if rank.memory.get(out) != want:
                raise ScheduleError(
                    f"rank {me}, chunk {chunk}, block {rank.block}: the output is wrong"
                )
        rank.memory = self._inputs(me)
        rank.block, rank.pc, rank.entered = rank.block + 1, 0, False

    def _inputs(self, rank: int) -> dict[Ref, Content]:
        inputs = {}
        for chunk in self.collective.initial(rank):
            ref = self.collective.input_ref(rank, chunk)
            assert ref is not None
            key = Ref(space=Space.IN, rank=rank, index=ref[0], part=ref[1])
            inputs[key] = chunk, 1 << rank
        return inputs

    def _check_last(self, plan: Plan) -> None:
        last = plan.records[-1] if plan.records else None
        if last is None or last.code is not Code.POST or last.value != plan.stages:
            raise ScheduleError(f"rank {plan.rank}: the plan does not end in POST {plan.stages}")

    def _where(self, rank: _Rank) -> str:
        record = rank.records[rank.pc]
        what = record.code.name
        if record.code is Code.WAIT:
            what += f" {record.peer}:{record.value}"
        elif record.code is Code.POST:
            what += f" {record.value}"
        return f"rank {rank.plan.rank}, record {rank.pc} ({what}), block {rank.block}"


def _text(ref: Ref) -> str:
    return f"{ref.space.name} {ref.index}.{ref.part} of rank {ref.rank}"
