"""Lower a schedule to one plan per rank.

A location's first value lives in the input. A written value gets a home in the output if it is
final or used locally later and its location has a place there, else in private memory if used
locally later, else none. A value gets a staging slot iff another rank reads it; all its readers
share the slot. In each round a rank first fills the slots that its inputs need and posts, then
waits for its sources and reads their slots, then posts again if that filled slots.

A plan names slots and posts of other ranks, so all ranks are laid out, but records are only made
for the plans that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.schedule.collective import Collective
from unisono.schedule.dataflow import Dataflow, Value, trace
from unisono.schedule.plan import NO_REF, Code, Flag, Plan, Reader, Record, Ref, Space
from unisono.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The plan of one rank, with what it has to know of the others.

    `slots` are the staging slots of each rank; `uniform` and `in_place` hold for the group: some
    rank needs pieces of one length, and no rank minds when input and output are the same memory.
    `in_rank_order` is that of `Dataflow`.
    """

    plan: Plan
    slots: tuple[int, ...]
    uniform: bool
    in_place: bool
    in_rank_order: bool


def lower(schedule: Schedule) -> tuple[Plan, ...]:
    """One plan per rank. Raises `ScheduleError` when the schedule is wrong.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> [[r.code.name for r in plan.records] for plan in lower(b.build())]
    [['COPY', 'POST', 'COPY', 'POST'], ['WAIT', 'COPY', 'POST']]
    """
    return _Lowering(schedule, range(schedule.collective.ranks)).plans()


def lower_rank(schedule: Schedule, rank: int) -> RankPlan:
    """The plan of one rank: the same as `lower(schedule)[rank]`, in a fraction of the time.

    Raises `ScheduleError` when the schedule is wrong.
    """
    lowering = _Lowering(schedule, range(rank, rank + 1))
    (plan,) = lowering.plans()
    return RankPlan(
        plan=plan,
        slots=tuple(program.num_slots for program in lowering.programs),
        uniform=any(program.uniform for program in lowering.programs),
        in_place=all(program.in_place for program in lowering.programs),
        in_rank_order=lowering.flow.in_rank_order,
    )


class _Lowering:
    """All ranks' programs, with records for some of them."""

    def __init__(self, schedule: Schedule, wanted: range) -> None:
        collective = schedule.collective
        self.flow = trace(schedule)
        self.wanted = wanted
        uses = _Uses(self.flow)
        staged: dict[Value, tuple[int, int, int]] = {}
        self.programs = [
            _Program(collective, rank, uses, staged, emits=rank in wanted)
            for rank in range(collective.ranks)
        ]
        for number, by_rank in self.flow.writes.items():
            for rank, values in uses.first_sends.get(number, {}).items():
                self.programs[rank].round = number
                self.programs[rank].send(values)
            for rank, values in by_rank.items():
                self.programs[rank].round = number
                self.programs[rank].receive(values)
        self.rounds = 1 + max(self.flow.writes, default=0)
        for program in self.programs:
            program.round = self.rounds - 1
            program.bring_untouched(self.flow)

    def plans(self) -> tuple[Plan, ...]:
        """The plans that are wanted."""
        stages = 1 + max(program.posts for program in self.programs)
        depth = max((value.depth for value in self.flow.outputs.values()), default=0)
        return tuple(
            self.programs[rank].plan(stages, depth, self.rounds) for rank in self.wanted
        )


class _Uses:
    """Who reads each value: its own rank, others, and from which round on."""

    def __init__(self, flow: Dataflow) -> None:
        self.ranks = flow.schedule.collective.ranks
        self.final = set(flow.outputs.values())
        self.local: set[Value] = set()
        self.remote: dict[Value, set[int]] = {}  # with the ranks that read it
        self.first_sends: dict[int, dict[int, list[Value]]] = {}
        for number, by_rank in flow.writes.items():
            for values in by_rank.values():
                for value in values:
                    self._add(number, value)

    def _add(self, number: int, value: Value) -> None:
        for operand in value.operands:
            if operand.rank == value.rank:
                self.local.add(operand)
            elif operand in self.remote:
                self.remote[operand].add(value.rank)
            else:
                self.remote[operand] = {value.rank}
                if not operand.operands:
                    sends = self.first_sends.setdefault(number, {})
                    sends.setdefault(operand.rank, []).append(operand)


class _Program:
    """The layout of one rank and, if it `emits`, its records, made round by round.

    `staged` is shared by the programs: the slot of a value and the post that covers it.
    """

    def __init__(
        self,
        collective: Collective,
        rank: int,
        uses: _Uses,
        staged: dict[Value, tuple[int, int, int]],
        *,
        emits: bool,
    ) -> None:
        self.collective = collective
        self.rank = rank
        self.uses = uses
        self.staged = staged
        self.emits = emits
        self.records: list[Record] = []
        self.posts = 0
        self.round = 0
        self.num_slots = 0
        self.readers: list[Reader] = []
        self.uniform = False
        self.in_place = True
        self.tmp: dict[int, Ref] = {}
        self.outputs: dict[int, Ref] = {}
        self.lengths: dict[int, Ref] = {}
        self.homes: dict[Value, Ref] = {}
        self.written: set[tuple[int, int]] = set()
        self.seen = [0] * collective.ranks

    def send(self, values: list[Value]) -> None:
        """Copy input values into slots, and post."""
        for value in values:
            self._copy(value, self._slot(self._new_slot(value)))
        self._post()

    def receive(self, values: list[Value]) -> None:
        """Write the values of one round, each after the waits it needs; post if any is staged."""
        ranks = self.collective.ranks
        # Starting with the next rank spreads the readers over the sources.
        values = sorted(values, key=lambda v: (v.operands[0].rank - self.rank - 1) % ranks)
        staged = False
        for value in values:
            if self.emits:
                for operand in value.operands:
                    self._wait(operand)
            home, slot = self._home(value), None
            if value in self.uses.remote:
                slot = self._new_slot(value)
                staged = True
            self._write(value, home, slot)
        if staged:
            self._post()

    def bring_untouched(self, flow: Dataflow) -> None:
        """Copy inputs that are results to the output: the last thing a rank does in a block."""
        for chunk in self.collective.wanted(self.rank):
            value = flow.outputs[self.rank, chunk]
            if not value.operands:
                self._copy(value, self._output(chunk))

    def plan(self, stages: int, depth: int, rounds: int) -> Plan:
        """The plan, ending in the post of the end of the block."""
        return Plan(
            rank=self.rank,
            ranks=self.collective.ranks,
            records=(*self.records, Record(code=Code.POST, value=stages, round=rounds - 1)),
            rounds=rounds,
            num_slots=self.num_slots,
            num_tmp=len(self.tmp),
            parts=self.collective.parts,
            stages=stages,
            reduce_depth=depth,
            uniform=self.uniform,
            in_place=self.in_place,
            readers=tuple(sorted(self.readers)),
        )

    def _copy(self, value: Value, dst: Ref) -> None:
        """Copy an input value."""
        length = self._length(value.chunk)
        self._note_reads((value,))
        self._note_write(dst)
        if self.emits:
            self.records.append(
                Record(
                    code=Code.COPY, dst=dst, src=self._read(value), length=length, round=self.round
                )
            )

    def _write(self, value: Value, home: Ref | None, slot: int | None) -> None:
        length = self._length(value.chunk)
        self._note_reads(value.operands)
        if home is not None:
            self._note_write(home)
        if not self.emits:
            return
        places = [home] if home else []
        if slot is not None:
            places.append(self._slot(slot))
        dst, second = (*places, NO_REF)[:2]  # a live value is read by someone
        flags = Flag.HAS_DST2 if len(places) == 2 else Flag.NONE
        sources = [self._read(operand) for operand in value.operands]
        if not value.reduces:
            self.records.append(
                Record(
                    code=Code.COPY, flags=flags, dst=dst, dst2=second, src=sources[0], length=length,
                    round=self.round,
                )
            )
            return
        if value.mask == (1 << self.collective.ranks) - 1:
            flags |= Flag.FINAL
        self.records.append(
            Record(
                code=Code.REDUCE,
                nsrc=len(sources),
                flags=flags,
                dst=dst,
                dst2=second,
                length=length,
                round=self.round,
            )
        )
        self.records += [
            Record(code=Code.ARG, src=src, length=length, round=self.round) for src in sources
        ]

    def _wait(self, value: Value) -> None:
        if value.rank == self.rank:
            return
        _, post, posted = self.staged[value]
        if self.seen[value.rank] < post:
            self.seen[value.rank] = post
            self.records.append(Record(code=Code.WAIT, peer=value.rank, value=post, round=self.round, posted=posted))

    def _post(self) -> None:
        self.posts += 1
        if self.emits:
            self.records.append(Record(code=Code.POST, value=self.posts, round=self.round))

    def _new_slot(self, value: Value) -> int:
        slot = self.num_slots
        self.num_slots += 1
        post = self.posts + 1
        self.staged[value] = slot, post, self.round
        if self.emits:
            self.readers += [Reader(post, slot, rank) for rank in self.uses.remote[value]]
        return slot

    def _slot(self, index: int) -> Ref:
        return Ref(space=Space.SLOT, rank=self.rank, index=index)

    def _home(self, value: Value) -> Ref | None:
        if value not in self.uses.final and value not in self.uses.local:
            return None
        chunk = value.location
        if chunk < self.collective.num_chunks and self.collective.wants(self.rank, chunk):
            home = self._output(chunk)
        else:
            home = self.tmp.setdefault(
                chunk, Ref(space=Space.TMP, rank=self.rank, index=len(self.tmp))
            )
        self.homes[value] = home
        return home

    def _read(self, value: Value) -> Ref:
        if value.rank != self.rank:
            return Ref(space=Space.SLOT, rank=value.rank, index=self.staged[value][0])
        if value.operands:
            return self.homes[value]
        return self._ref(Space.IN, self.collective.input_ref(self.rank, value.chunk))

    def _ref(self, space: Space, place: tuple[int, int] | None) -> Ref:
        assert place is not None, "the piece exists here"
        return Ref(space=space, rank=self.rank, index=place[0], part=place[1])

    def _output(self, chunk: int) -> Ref:
        found = self.outputs.get(chunk)
        if found is None:
            found = self._ref(Space.OUT, self.collective.output_ref(self.rank, chunk))
            self.outputs[chunk] = found
        return found

    def _length(self, chunk: int) -> Ref:
        """A part of this rank's input or output that is as long as the chunk."""
        found = self.lengths.get(chunk)
        if found is None:
            found = self.lengths[chunk] = self._find_length(chunk)
        return found

    def _find_length(self, chunk: int) -> Ref:
        for space, find in (
            (Space.IN, self.collective.input_ref),
            (Space.OUT, self.collective.output_ref),
        ):
            place = find(self.rank, chunk)
            if place is not None:
                return self._ref(space, place)
        # A relay of gather, scatter or all_to_all knows but its own pieces' lengths.
        self.uniform = True
        space = Space.IN if self.collective.input_pieces(self.rank) else Space.OUT
        return self._ref(space, (0, chunk % self.collective.parts))

    def _note_reads(self, values: tuple[Value, ...]) -> None:
        """Input that is read after it may have been written as output must be other memory."""
        for value in values:
            if self.written and value.rank == self.rank and not value.operands:
                piece, part = self.collective.input_ref(self.rank, value.chunk) or (0, 0)
                out = self.collective.in_place_output(self.rank, piece)
                if out is not None and (out, part) in self.written:
                    self.in_place = False

    def _note_write(self, dst: Ref) -> None:
        if dst.space is Space.OUT:
            self.written.add((dst.index, dst.part))
