"""Conversion of the values of a program to a schedule, with as few rounds as the program's order
allows.

The conversion makes three passes over the values, in the order of their writes:

- A received value that is used only once, on the GPU that received it, is not stored. The operation
  that uses the value reads the sender's memory directly. (The executor of Unisono stages the value
  anyway.)
- A chain of reductions into one cell becomes one reduction with many operands.
- Each value is written in the earliest round in which its operands exist and no later reader needs
  the previous content of its location.

In a schedule, the input and output of a chunk share one location. A program that is not in place
may read an input after it has written the output. The output is then built in scratch and copied at
the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.schedule.coarsen import Move, assemble
from unisono.schedule.formats.buffers import Buffer, Buffers, Cell
from unisono.schedule.formats.symbolic_machine import SymbolicMachine, Value
from unisono.schedule.schedule import Schedule

_NEVER = 1 << 31


def to_schedule(machine: SymbolicMachine, name: str) -> Schedule:
    """Returns the schedule of a finished program. Raises `ScheduleError` for wrong results."""
    outputs = machine.outputs()
    values = _live(machine.written, outputs.values())
    _forward(values, outputs.values())
    _flatten(values)
    values = _live(values, outputs.values())
    try:
        plan = _Plan(machine.buffers, shared=True)
        plan.write_all(values, outputs)
    except _Clash:
        plan = _Plan(machine.buffers, shared=False)
        plan.write_all(values, outputs)
    return assemble(machine.buffers.collective, name, plan.moves, scratch=max(plan.scratch))


def _live(values: list[Value], outputs: Iterable[Value]) -> list[Value]:
    needed = set(outputs)
    kept = []
    for value in reversed(values):
        if value in needed:
            needed.update(value.operands)
            kept.append(value)
    return kept[::-1]


def _uses(values: list[Value]) -> Counter[Value]:
    return Counter(operand for value in values for operand in value.operands)


def _forward(values: list[Value], outputs: Iterable[Value]) -> None:
    """Replaces each received value that is used only once, on the receiving GPU, by the sender's
    value.
    """
    uses = _uses(values)
    uses.update(outputs)
    for user in values:
        operands = list(user.operands)
        for i, held in enumerate(operands):
            if held.gpu != user.gpu or len(held.operands) != 1 or uses[held] > 1:
                continue
            source = held.operands[0]
            if source.gpu != held.gpu:
                operands[i] = source
                uses[held] -= 1
        user.operands = tuple(operands)


def _flatten(values: list[Value]) -> None:
    """Merges each reduction into the next reduction in the same cell, if only the next reduction
    uses the result of the first.
    """
    uses = _uses(values)
    for value in values:
        operands: list[Value] = []
        for part in value.operands:
            joins = (
                len(part.operands) > 1
                and len(value.operands) > 1
                and part.memory is not None
                and part.memory == value.memory
                and uses[part] == 1
                and all(_lasts(operand, part, value) for operand in part.operands)
            )
            operands += part.operands if joins else (part,)
            for operand in part.operands if joins else ():
                if operand.overwritten_at == part.written_at and operand.memory == part.memory:
                    operand.overwritten_at = value.written_at
        value.operands = tuple(operands)


def _lasts(operand: Value, user: Value, later: Value) -> bool:
    """Returns true if `operand`, which `user` reads, can still be read when the value `later` is
    written. This is always so for an operand of another GPU, which can be copied to scratch in
    time.
    """
    if (
        operand.gpu != later.gpu
        or operand.overwritten_at is None
        or operand.overwritten_at >= later.written_at
    ):
        return True
    return operand.memory == user.memory and operand.overwritten_at == user.written_at


class _Clash(Exception):
    """Raised if the program reads an input after it has written the output that shares the input's
    location.
    """


@dataclass(slots=True, eq=False)
class _Content:
    """A value at a location. `ready` is the first round that can read the value, and
    `overwritten_in` the round that overwrites the value.
    """

    rank: int
    location: int
    ready: int
    overwritten_in: int = _NEVER


@dataclass(slots=True)
class _Location:
    content: _Content
    read_by_others: int = 0
    read_here: int = -1

    @property
    def free(self) -> int:
        """First round that may overwrite the location."""
        return max(self.content.ready, self.read_by_others, self.read_here + 1)


class _Plan:
    def __init__(self, buffers: Buffers, *, shared: bool) -> None:
        self.buffers = buffers
        self.shared = shared or buffers.in_place
        self.moves: list[Move] = []
        self.scratch = [0] * buffers.collective.ranks
        self.scratch_of: dict[Cell, int] = {}
        self.contents: dict[Value, _Content] = {}
        self.locations: dict[tuple[int, int], _Location] = {}

    def write_all(self, values: list[Value], outputs: dict[Cell, Value]) -> None:
        for value in (*values, *outputs.values()):
            for operand in (*value.operands, value):
                if not operand.operands and operand not in self.contents:
                    self._hold(operand, self._content(operand, operand.chunk, 0))
        for value in values:
            self._write(value)
        for cell, value in outputs.items():
            content = self.contents[value]
            if content.location != value.chunk:
                self._move(content, cell.gpu, value.chunk, value.channel)

    def _write(self, value: Value) -> None:
        first, *others = self._base_first(value)
        content = self.contents[first]
        location = self._location(value)
        if (content.rank, content.location) != (value.gpu, location):
            content = self._move(content, value.gpu, location, value.channel)
        elif content.overwritten_in != _NEVER:
            raise _Clash
        if others:
            content = self._reduce([self.contents[o] for o in others], content, value.channel)
        self.contents[value] = content

    def _base_first(self, value: Value) -> list[Value]:
        """Returns the operands. The first operand is the base into which the other operands are
        reduced.
        """
        location = self._location(value)

        def order(operand: Value) -> tuple[bool, bool]:
            content = self.contents[operand]
            here = (content.rank, content.location) == (value.gpu, location)
            return not (here and content.overwritten_in == _NEVER), content.rank != value.gpu

        return sorted(value.operands, key=order)

    def _move(self, source: _Content, rank: int, location: int, channel: int) -> _Content:
        target = self.locations.get((rank, location))
        return self._write_location(
            [source], rank, location, target.free if target else 0, False, channel
        )

    def _reduce(self, sources: list[_Content], target: _Content, channel: int) -> _Content:
        rank, location = target.rank, target.location
        free = self.locations[rank, location].free
        return self._write_location(sources, rank, location, free, True, channel)

    def _write_location(
        self,
        sources: list[_Content],
        rank: int,
        location: int,
        free: int,
        reduce: bool,
        channel: int,
    ) -> _Content:
        """Writes a location in round `free` or, if later, in the first round in which all sources
        exist."""
        number = max(free, *(source.ready for source in sources))
        late = [
            s
            for s in sources
            if number > s.overwritten_in or (number == s.overwritten_in and s.rank == rank)
        ]
        if late:
            kept = [self._copy_to_scratch(s, rank, channel) if s in late else s for s in sources]
            return self._write_location(kept, rank, location, free, reduce, channel)
        for source in sources:
            self._read(source, rank, number)
            self.moves.append(
                Move(number, source.rank, rank, reduce, channel, source.location, location)
            )
        return self._replace(rank, location, number)

    def _copy_to_scratch(self, source: _Content, rank: int, channel: int) -> _Content:
        """Copies a source to the receiver's scratch, because the sender overwrites the source too
        early.
        """
        if source.rank == rank:
            raise _Clash
        waiting = self._new_scratch(rank)
        return self._write_location([source], rank, waiting, 0, False, channel)

    def _read(self, source: _Content, rank: int, number: int) -> None:
        location = self.locations[source.rank, source.location]
        if location.content is not source:
            return  # the caller has checked that no earlier round overwrites the source
        if source.rank == rank:
            location.read_here = max(location.read_here, number)
        else:
            location.read_by_others = max(location.read_by_others, number)

    def _replace(self, rank: int, location: int, number: int) -> _Content:
        old = self.locations.get((rank, location))
        if old is not None:
            old.content.overwritten_in = number
        content = _Content(rank, location, number + 1)
        self.locations[rank, location] = _Location(content)
        return content

    def _hold(self, value: Value, content: _Content) -> None:
        self.contents[value] = content
        self.locations[content.rank, content.location] = _Location(content)

    def _content(self, value: Value, location: int, ready: int) -> _Content:
        return _Content(value.gpu, location, ready)

    def _location(self, value: Value) -> int:
        """Returns the location of a value. On first use, assigns a scratch location to a cell
        without a location, or to a value without a cell.
        """
        cell = value.memory or Cell(value.gpu, Buffer.SCRATCH, -1 - value.written_at)
        location = self.buffers.location(cell)
        if location is not None and (self.shared or cell.buffer is not Buffer.OUTPUT):
            return location
        if cell not in self.scratch_of:
            self.scratch_of[cell] = self._new_scratch(value.gpu)
        return self.scratch_of[cell]

    def _new_scratch(self, rank: int) -> int:
        self.scratch[rank] += 1
        return self.buffers.collective.num_chunks + self.scratch[rank] - 1
