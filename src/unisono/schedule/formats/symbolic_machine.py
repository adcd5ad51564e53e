"""Symbolic execution of a program with many threads, which finds the results, deadlocks and races.

A program is a list of threads. A thread is a list of steps. A step can wait, read cells and write
cells. Threads run until all finish, or until none can continue, which is a deadlock. Only
synchronisation orders events. Each thread has a vector clock. Messages, flags and signals carry
clocks to other threads. In any order of the threads, a read must follow the write of its value, and
a write must follow all earlier reads and writes of its cell. Otherwise the program has a race.

The result is a list of the written values, in an order that every race-free run respects.
`round_assignment` reads this list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from unisono.errors import ScheduleError
from unisono.schedule.formats.buffers import Buffers, Cell

Clock = dict[int, int]
"""Vector clock: the number of steps that have happened in each known thread."""


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """Content of a cell between two writes: contributions to one chunk. `mask` has one bit for each
    contributing rank.

    `operands` is empty for an input. A copy has one operand, a reduction several. `memory` is None
    for a value that no cell stores and only messages carry. `written_at` is the number of the
    value's own write. `overwritten_at` is the number of the next write to the cell.
    """

    gpu: int
    memory: Cell | None
    chunk: int
    mask: int
    operands: tuple[Value, ...] = ()
    channel: int = 0
    written_at: int = -1
    overwritten_at: int | None = None


@dataclass(slots=True, kw_only=True)
class _State:
    """Value of one cell, its last write, and the reads since the last write."""

    value: Value
    writer: int = -1
    written: int = 0
    where: str = "the input"
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)


S = TypeVar("S")


@dataclass(slots=True, eq=False, kw_only=True)
class Thread(Generic[S]):
    """One threadblock of one GPU: its steps, its progress, and its vector clock."""

    number: int
    gpu: int
    steps: Sequence[S]
    channel: int = 0
    at: int = 0
    clock: Clock = field(default_factory=dict)

    def learn(self, clock: Clock) -> None:
        """Records that all events of `clock` precede the next step of this thread."""
        mine = self.clock
        for thread, steps in clock.items():
            if mine.get(thread, 0) < steps:
                mine[thread] = steps


class SymbolicMachine:
    """Memory of all GPUs. The argument `where` of the methods is the position in the file, for
    errors.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.written: list[Value] = []
        self._cells = {
            memory: _State(
                value=Value(gpu=memory.gpu, memory=memory, chunk=chunk, mask=1 << memory.gpu)
            )
            for memory, chunk in buffers.initial().items()
        }

    def holds(self, cell: Cell) -> bool:
        """Returns true if the cell holds a value."""
        return self.buffers.memory(cell) in self._cells

    def read(self, thread: Thread[S], cell: Cell, where: str) -> Value:
        """Returns the value of a cell. Raises `ScheduleError` for an empty cell or a race."""
        state = self._cells.get(self.buffers.memory(cell))
        if state is None:
            raise ScheduleError(f"{where} reads {cell}, which is empty")
        if state.writer >= 0 and thread.clock.get(state.writer, 0) < state.written:
            raise ScheduleError(
                f"{where} reads {cell}, unordered with the write by {state.where}: a race"
            )
        state.reads[thread.number] = thread.clock[thread.number], where
        return state.value

    def write(self, thread: Thread[S], cell: Cell, value: Value, where: str) -> Value:
        """Writes a value to a cell. Returns the stored value. Raises `ScheduleError` for a race."""
        memory = self.buffers.memory(cell)
        state = self._cells.get(memory)
        number = len(self.written)
        if state is not None:
            self._check_write(thread, state, cell, where)
            state.value.overwritten_at = number
        # A reduction that no cell stores yet becomes the content of this cell. Any other value is
        # copied: the content is a new value, whose only operand is the copied value.
        fresh = value.memory is None and value.written_at < 0 and len(value.operands) > 1
        held = Value(
            gpu=cell.gpu,
            memory=memory,
            chunk=value.chunk,
            mask=value.mask,
            operands=value.operands if fresh else (value,),
            channel=thread.channel,
            written_at=number,
        )
        self.written.append(held)
        self._cells[memory] = _State(
            value=held,
            writer=thread.number,
            written=thread.clock[thread.number],
            where=where,
        )
        return held

    def keep(self, thread: Thread[S], value: Value) -> Value:
        """Records a reduction that no cell stores, for use in later messages."""
        value.written_at = len(self.written)
        value.channel = thread.channel
        self.written.append(value)
        return value

    def reduce(self, gpu: int, values: Sequence[Value], where: str) -> Value:
        """Returns the reduction of several values, which no cell stores yet. Raises `ScheduleError`
        for operands of several chunks, or for a contribution that occurs twice.
        """
        chunk, mask = values[0].chunk, 0
        for value in values:
            if value.chunk != chunk:
                raise ScheduleError(
                    f"{where} mixes contributions to chunk {chunk} and {value.chunk}"
                )
            if mask & value.mask:
                raise ScheduleError(
                    f"{where} takes the contribution of {_ranks(mask & value.mask)} twice"
                )
            mask |= value.mask
        return Value(gpu=gpu, memory=None, chunk=chunk, mask=mask, operands=tuple(values))

    def outputs(self) -> dict[Cell, Value]:
        """Returns the final values. Raises `ScheduleError` for values that the collective does not
        expect.
        """
        found = {}
        for cell, chunk in self.buffers.expected().items():
            state = self._cells.get(self.buffers.memory(cell))
            if state is None:
                raise ScheduleError(f"{cell} is empty at the end")
            value = state.value
            if value.chunk != chunk:
                raise ScheduleError(
                    f"{cell} holds chunk {value.chunk} at the end, expected chunk {chunk}; "
                    f"last written by {state.where}"
                )
            want = sum(1 << r for r in self.buffers.collective.contributors(cell.gpu, chunk))
            if value.mask != want:
                raise ScheduleError(
                    f"{cell} lacks the contribution of {_ranks(want & ~value.mask)} at the end; "
                    f"last written by {state.where}"
                )
            found[cell] = value
        return found

    def _check_write(self, thread: Thread[S], state: _State, cell: Cell, where: str) -> None:
        if state.writer >= 0 and thread.clock.get(state.writer, 0) < state.written:
            raise ScheduleError(
                f"{where} writes {cell}, unordered with the write by {state.where}: a race"
            )
        for reader, (time, place) in state.reads.items():
            if thread.clock.get(reader, 0) < time:
                raise ScheduleError(
                    f"{where} writes {cell}, unordered with the read by {place}: a race"
                )


def run(
    threads: Sequence[Thread[S]],
    step: Callable[[Thread[S], S], str | None],
    name: Callable[[Thread[S]], str],
) -> None:
    """Runs all threads. `step` runs one step, or returns the event that the step waits for.

    Raises `ScheduleError` for a deadlock, with the events that the threads wait for.
    """
    waiting: dict[int, str] = {}
    running = [thread for thread in threads if thread.steps]
    while running:
        moved = False
        for thread in running:
            while thread.at < len(thread.steps):
                thread.clock[thread.number] = thread.at + 1
                wait = step(thread, thread.steps[thread.at])
                if wait is not None:
                    waiting[thread.number] = wait
                    break
                thread.at += 1
                moved = True
        running = [thread for thread in running if thread.at < len(thread.steps)]
        if running and not moved:
            few = "; ".join(f"{name(t)} waits for {waiting[t.number]}" for t in running[:4])
            more = f"; and {len(running) - 4} more" if len(running) > 4 else ""
            raise ScheduleError(f"deadlock: {few}{more}")


def _ranks(mask: int) -> str:
    ranks = [str(r) for r in range(mask.bit_length()) if mask >> r & 1]
    return f"gpu {', '.join(ranks)}"
