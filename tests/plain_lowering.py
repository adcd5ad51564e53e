"""A simple lowering with one object for each value, with which the fast `lower` must agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unisono.schedule import Code, ExecutionPlan, Flag, Reader, Record, Ref, Schedule, Space

Place = tuple[int, int]


@dataclass(eq=False, kw_only=True)
class Value:
    """The content of a location from one write to the next write."""

    rank: int
    location: int
    chunk: int
    mask: int
    operands: tuple[Value, ...] = ()
    depth: int = 0


class Flow:
    """Values of a correct schedule; `writes[round][rank]` has the written values that an output
    depends on.
    """

    def __init__(self, schedule: Schedule) -> None:
        collective = schedule.collective
        self.ranks = range(collective.ranks)
        self.state = {
            (rank, chunk): Value(rank=rank, location=chunk, chunk=chunk, mask=1 << rank)
            for rank in self.ranks
            for chunk in collective.initial(rank)
        }
        written = [
            (number, value)
            for number, transfers in schedule.rounds()
            for value in self._round(list(transfers))
        ]
        self.outputs = {
            (rank, chunk): self.state[rank, chunk]
            for rank in self.ranks
            for chunk in collective.wanted(rank)
        }
        live = set(self.outputs.values())
        self.writes: dict[int, dict[int, list[Value]]] = {}
        for number, value in reversed(written):
            if value in live:
                live.update(value.operands)
                by_rank = self.writes.setdefault(number, {})
                by_rank.setdefault(value.rank, []).insert(0, value)

    def _round(self, transfers: list) -> list[Value]:  # type: ignore[type-arg]
        incoming: dict[Place, list[Value]] = {}
        own: dict[Place, Value] = {}
        for t in transfers:
            for i in range(t.count):
                place = t.dst, t.dst_chunk + i
                incoming.setdefault(place, []).append(self.state[t.src, t.src_chunk + i])
                if t.reduce:
                    own[place] = self.state[place]
        made = []
        for place, operands in incoming.items():
            if place in own:
                operands.insert(0, own[place])
                operands.sort(key=lambda v: v.rank)
            made.append(
                Value(
                    rank=place[0],
                    location=place[1],
                    chunk=operands[0].chunk,
                    mask=sum(v.mask for v in operands),
                    operands=tuple(operands),
                    depth=max(v.depth for v in operands) + (len(operands) > 1),
                )
            )
        self.state |= {(value.rank, value.location): value for value in made}
        return made


class Program:
    """The records of one rank, made round by round. `staged`, which all ranks share, has the slots
    of the values.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        flow: Flow,
        staged: dict,  # type: ignore[type-arg]
        shares_memory: bool,
    ) -> None:
        self.final = set(flow.outputs.values())
        self.shares_memory = shares_memory
        self.collective = schedule.collective
        self.rank = rank
        self.staged = staged
        self.records: list[Record] = []
        self.readers: list[Reader] = []
        self.posts = self.num_slots = 0
        self.uniform, self.in_place = False, True
        self.kept = set(flow.outputs.values())
        self.reads: dict[Value, set[int]] = {}
        for by_rank in flow.writes.values():
            for value in (value for values in by_rank.values() for value in values):
                for operand in value.operands:
                    if operand.rank == value.rank:
                        self.kept.add(operand)
                    else:
                        self.reads.setdefault(operand, set()).add(value.rank)
        self.tmp: dict[int, Ref] = {}
        self.refs: dict[Value, Ref] = {}
        self.written: set[Place] = set()
        self.seen: dict[int, int] = {}
        self.round = 0

    def send(self, values: list[Value]) -> None:
        for value in values:
            if self.shares_memory:
                src, length = self.read(value), self.length(value.chunk)
                self.add(code=Code.SHARE, dst=self.new_slot(value), src=src, length=length)
            else:
                self.copy(value, self.new_slot(value))
        self.post()

    def receive(self, values: list[Value]) -> None:
        ranks = self.collective.ranks
        for value in sorted(values, key=lambda v: (v.operands[0].rank - self.rank - 1) % ranks):
            for operand in value.operands:
                self.wait(operand)
            places = []
            if value in self.kept:
                places.append(self.home(value))
            if value in self.reads:
                places.append(self.new_slot(value))
            self.write(value, places)
        if any(value in self.reads for value in values):
            self.post()

    def bring(self, flow: Flow) -> None:
        for chunk in self.collective.wanted(self.rank):
            value = flow.outputs[self.rank, chunk]
            if not value.operands:
                self.copy(value, self.output(chunk))

    def copy(self, value: Value, dst: Ref) -> None:
        self.note((value,), dst)
        length = self.length(value.chunk)
        self.add(code=Code.COPY, dst=dst, src=self.read(value), length=length)

    def write(self, value: Value, places: list[Ref]) -> None:
        self.note(value.operands, places[0])
        second = Flag.SHARES if self.shared(value) else Flag.HAS_DST2
        flags = second if len(places) == 2 else Flag.NONE
        dst, dst2 = (*places, Ref())[:2]
        length = self.length(value.chunk)
        sources = [self.read(operand) for operand in value.operands]
        head = {"dst": dst, "dst2": dst2, "length": length}
        if len(sources) == 1:
            self.add(code=Code.COPY, flags=flags, src=sources[0], **head)
            return
        if value.mask == (1 << self.collective.ranks) - 1:
            flags |= Flag.FINAL
        self.add(code=Code.REDUCE, flags=flags, nsrc=len(sources), **head)
        for src in sources:
            self.add(code=Code.ARG, src=src, length=length)

    def wait(self, value: Value) -> None:
        if value.rank != self.rank:
            _, post, posted = self.staged[value]
            if self.seen.get(value.rank, 0) < post:
                self.seen[value.rank] = post
                self.add(code=Code.WAIT, peer=value.rank, value=post, posted=posted)

    def post(self) -> None:
        self.posts += 1
        self.add(code=Code.POST, value=self.posts)

    def add(self, **fields: Any) -> None:
        self.records.append(Record(round=self.round, **fields))

    def new_slot(self, value: Value) -> Ref:
        slot = Ref(space=Space.SLOT, rank=self.rank, index=self.num_slots)
        self.num_slots += 1
        self.staged[value] = slot, self.posts + 1, self.round
        self.readers += [Reader(self.posts + 1, slot.index, rank) for rank in self.reads[value]]
        return slot

    def home(self, value: Value) -> Ref:
        at = value.location
        if at < self.collective.num_chunks and self.collective.wants(self.rank, at):
            home = self.output(at)
        else:
            new = Ref(space=Space.TMP, rank=self.rank, index=len(self.tmp))
            home = self.tmp.setdefault(at, new)
        self.refs[value] = home
        return home

    def read(self, value: Value) -> Ref:
        if value.rank != self.rank:
            slot: Ref = self.staged[value][0]
            return replace(slot, space=Space.SHARED) if self.shared(value) else slot
        if value.operands:
            return self.refs[value]
        return self.ref(Space.IN, self.collective.input_ref(self.rank, value.chunk))

    def shared(self, value: Value) -> bool:
        return self.shares_memory and (not value.operands or value in self.final)

    def output(self, chunk: int) -> Ref:
        return self.ref(Space.OUT, self.collective.output_ref(self.rank, chunk))

    def ref(self, space: Space, place: Place | None) -> Ref:
        assert place is not None
        return Ref(space=space, rank=self.rank, index=place[0], part=place[1])

    def length(self, chunk: int) -> Ref:
        given = self.collective.input_ref(self.rank, chunk)
        if given is not None:
            return self.ref(Space.IN, given)
        wanted = self.collective.output_ref(self.rank, chunk)
        if wanted is not None:
            return self.ref(Space.OUT, wanted)
        self.uniform = True
        space = Space.IN if self.collective.input_pieces(self.rank) else Space.OUT
        return self.ref(space, (0, chunk % self.collective.parts))

    def note(self, values: tuple[Value, ...], dst: Ref) -> None:
        """Detects inputs that are read after an output was written, if input and output have the
        same memory in an in-place call. Such a program cannot run in place.
        """
        for value in values:
            if value.rank == self.rank and not value.operands:
                piece, part = self.collective.input_ref(self.rank, value.chunk) or (0, 0)
                out = self.collective.in_place_output(self.rank, piece)
                if out is not None and (out, part) in self.written:
                    self.in_place = False
        if dst.space is Space.OUT:
            self.written.add((dst.index, dst.part))


def plain_lower(schedule: Schedule, *, shares_memory: bool = False) -> tuple[ExecutionPlan, ...]:
    """Returns the plans of all ranks; the schedule must be correct."""
    flow = Flow(schedule)
    staged: dict[Value, tuple[Ref, int, int]] = {}
    numbers = [number for number, _ in schedule.rounds()]
    programs = [Program(schedule, rank, flow, staged, shares_memory) for rank in flow.ranks]
    sent: set[Value] = set()
    for number, by_rank in sorted(flow.writes.items()):
        for program in programs:
            program.round = numbers.index(number)
        sends: dict[int, list[Value]] = {}
        for value in (value for values in by_rank.values() for value in values):
            for operand in value.operands:
                if operand.rank != value.rank and not operand.operands and operand not in sent:
                    sent.add(operand)
                    sends.setdefault(operand.rank, []).append(operand)
        for rank, values in sends.items():
            programs[rank].send(values)
        for rank, values in by_rank.items():
            programs[rank].receive(values)
    rounds = max(len(numbers), 1)
    for program in programs:
        program.round = rounds - 1
        program.bring(flow)
    stages = 1 + max(program.posts for program in programs)
    return tuple(
        ExecutionPlan(
            rank=program.rank,
            ranks=schedule.collective.ranks,
            records=(*program.records, Record(code=Code.POST, value=stages, round=rounds - 1)),
            rounds=rounds,
            num_slots=program.num_slots,
            num_tmp=len(program.tmp),
            parts=schedule.collective.parts,
            stages=stages,
            reduce_depth=max((value.depth for value in flow.outputs.values()), default=0),
            uniform=program.uniform,
            in_place=program.in_place,
            readers=tuple(sorted(program.readers)),
            addresses_only=all(programs[0].shared(value) for value in staged),
        )
        for program in programs
    )
