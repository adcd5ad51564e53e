"""Lower a schedule to one plan per rank.

A location's first value lives in the input. A written value gets a home in the output if it is
final or used locally later and its location has a place there, else in private memory if used
locally later, else none. A value gets a staging slot iff another rank reads it; all its readers
share the slot. In each round a rank first fills the slots that its inputs need and posts, then
waits for its sources and reads their slots, then posts again if that filled slots.
"""

from __future__ import annotations

from unisono.schedule.collective import Collective
from unisono.schedule.dataflow import Dataflow, Value, trace
from unisono.schedule.plan import NO_REF, Code, Flag, Plan, Record, Ref, Space
from unisono.schedule.schedule import Schedule


def lower(schedule: Schedule) -> tuple[Plan, ...]:
    """One plan per rank. Raises `ScheduleError` when the schedule is wrong.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> [[r.code.name for r in plan.records] for plan in lower(b.build())]
    [['COPY', 'POST', 'COPY', 'POST'], ['WAIT', 'COPY', 'POST']]
    """
    flow = trace(schedule)
    uses = _Uses(flow)
    staged: dict[Value, tuple[Ref, int]] = {}
    programs = [_Program(schedule.collective, rank, uses, staged) for rank in range(uses.ranks)]
    for number, by_rank in flow.writes.items():
        sending = uses.first_sends.get(number, {})
        for rank, values in sending.items():
            programs[rank].send(values)
        for rank, values in by_rank.items():
            programs[rank].receive(values)
    stages = 1 + max(program.posts for program in programs)
    depth = max((v.depth for v in flow.outputs.values()), default=0)
    return tuple(program.finish(flow, stages, depth) for program in programs)


class _Uses:
    """Who reads each value: its own rank, others, and from which round on."""

    def __init__(self, flow: Dataflow) -> None:
        self.ranks = flow.schedule.collective.ranks
        self.final = set(flow.outputs.values())
        self.local: set[Value] = set()
        self.remote: set[Value] = set()
        self.first_sends: dict[int, dict[int, list[Value]]] = {}
        for number, by_rank in flow.writes.items():
            for values in by_rank.values():
                for value in values:
                    self._add(number, value)

    def _add(self, number: int, value: Value) -> None:
        for operand in value.operands:
            if operand.rank == value.rank:
                self.local.add(operand)
            elif operand not in self.remote:
                self.remote.add(operand)
                if not operand.operands:
                    sends = self.first_sends.setdefault(number, {})
                    sends.setdefault(operand.rank, []).append(operand)


class _Program:
    """The records of one rank, as they are emitted round by round.

    `staged` is shared by the programs: the slot of a value and the post that covers it.
    """

    def __init__(
        self, collective: Collective, rank: int, uses: _Uses, staged: dict[Value, tuple[Ref, int]]
    ) -> None:
        self.collective = collective
        self.rank = rank
        self.uses = uses
        self.staged = staged
        self.records: list[Record] = []
        self.posts = 0
        self.num_slots = 0
        self.uniform = False
        self.tmp: dict[int, Ref] = {}
        self.homes: dict[Value, Ref] = {}
        self.seen = [0] * collective.ranks

    def send(self, values: list[Value]) -> None:
        """Copy input values into slots, and post."""
        for value in values:
            slot = self._new_slot(value)
            length = self._length(value.chunk)
            self.records.append(
                Record(code=Code.COPY, dst=slot, src=self._read(value), length=length)
            )
        self._post()

    def receive(self, values: list[Value]) -> None:
        """Write the values of one round, each after the waits it needs; post if any is staged."""
        ranks = self.collective.ranks
        # Starting with the next rank spreads the readers over the sources.
        values = sorted(values, key=lambda v: (v.operands[0].rank - self.rank - 1) % ranks)
        for value in values:
            for operand in value.operands:
                self._wait(operand)
            self._write(value)
        if any(value in self.uses.remote for value in values):
            self._post()

    def finish(self, flow: Dataflow, stages: int, depth: int) -> Plan:
        """Bring untouched inputs to the output, post the end of the block."""
        for chunk in self.collective.wanted(self.rank):
            value = flow.outputs[self.rank, chunk]
            if not value.operands:
                self.records.append(
                    Record(
                        code=Code.COPY,
                        dst=self._output(chunk),
                        src=self._read(value),
                        length=self._length(chunk),
                    )
                )
        self.records.append(Record(code=Code.POST, value=stages))
        return Plan(
            rank=self.rank,
            ranks=self.collective.ranks,
            records=tuple(self.records),
            num_slots=self.num_slots,
            num_tmp=len(self.tmp),
            parts=self.collective.parts,
            stages=stages,
            reduce_depth=depth,
            uniform=self.uniform,
            in_place=self._may_alias(),
        )

    def _write(self, value: Value) -> None:
        home = self._home(value)
        slot = self._new_slot(value) if value in self.uses.remote else None
        dst = home or slot
        assert dst is not None, "a live value is read by someone"
        flags = Flag.HAS_DST2 if home and slot else Flag.NONE
        dst2 = slot if home and slot else NO_REF
        length = self._length(value.chunk)
        sources = [self._read(operand) for operand in value.operands]
        if not value.reduces:
            self.records.append(
                Record(
                    code=Code.COPY, flags=flags, dst=dst, dst2=dst2, src=sources[0], length=length
                )
            )
            return
        if value.mask == (1 << self.collective.ranks) - 1:
            flags |= Flag.FINAL
        self.records.append(
            Record(
                code=Code.REDUCE, nsrc=len(sources), flags=flags, dst=dst, dst2=dst2, length=length
            )
        )
        self.records += [Record(code=Code.ARG, src=src, length=length) for src in sources]

    def _wait(self, value: Value) -> None:
        if value.rank == self.rank:
            return
        _, post = self.staged[value]
        if self.seen[value.rank] < post:
            self.seen[value.rank] = post
            self.records.append(Record(code=Code.WAIT, peer=value.rank, value=post))

    def _post(self) -> None:
        self.posts += 1
        self.records.append(Record(code=Code.POST, value=self.posts))

    def _new_slot(self, value: Value) -> Ref:
        slot = Ref(space=Space.SLOT, rank=self.rank, index=self.num_slots)
        self.num_slots += 1
        self.staged[value] = slot, self.posts + 1
        return slot

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
            return self.staged[value][0]
        if value.operands:
            return self.homes[value]
        ref = self.collective.input_ref(self.rank, value.chunk)
        assert ref is not None, "an initial value is in the input"
        return Ref(space=Space.IN, rank=self.rank, index=ref[0], part=ref[1])

    def _output(self, chunk: int) -> Ref:
        ref = self.collective.output_ref(self.rank, chunk)
        assert ref is not None, "the chunk is wanted here"
        return Ref(space=Space.OUT, rank=self.rank, index=ref[0], part=ref[1])

    def _length(self, chunk: int) -> Ref:
        """A part of this rank's input or output that is as long as the chunk."""
        for space, find in (
            (Space.IN, self.collective.input_ref),
            (Space.OUT, self.collective.output_ref),
        ):
            ref = find(self.rank, chunk)
            if ref is not None:
                return Ref(space=space, rank=self.rank, index=ref[0], part=ref[1])
        # A relay of gather, scatter or all_to_all knows but its own pieces' lengths.
        self.uniform = True
        space = Space.IN if self.collective.input_pieces(self.rank) else Space.OUT
        return Ref(space=space, rank=self.rank, index=0, part=chunk % self.collective.parts)

    def _may_alias(self) -> bool:
        """Whether no input is read after the output that may be the same memory is written."""
        written: set[tuple[int, int]] = set()
        pending: Ref | None = None
        for record in self.records:
            if record.code is not Code.ARG and pending is not None:
                written.add((pending.index, pending.part))  # only after its operands were read
                pending = None
            if record.code in (Code.COPY, Code.ARG) and record.src.space is Space.IN:
                piece = self.collective.in_place_output(self.rank, record.src.index)
                if piece is not None and (piece, record.src.part) in written:
                    return False
            if record.code in (Code.COPY, Code.REDUCE) and record.dst.space is Space.OUT:
                pending = record.dst
        return True
