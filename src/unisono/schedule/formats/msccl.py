"""Reader of MSCCL XML, which runs the threadblocks symbolically and converts the result to a
schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from unisono.errors import ScheduleError
from unisono.schedule.collective import Collective
from unisono.schedule.formats.buffers import Buffer, Buffers, Cell, operation, pieces
from unisono.schedule.formats.msccl_file import MscclBlock, MscclStep, Program, parse
from unisono.schedule.formats.round_assignment import to_schedule
from unisono.schedule.formats.symbolic_machine import Clock, SymbolicMachine, Thread, Value, run
from unisono.schedule.schedule import Schedule


def from_msccl_xml(text: str) -> Schedule:
    """Reads an MSCCL program: XML that `msccl-tools` writes and that MSCCL and RCCL run.

    The reader supports allreduce, allgather, reducescatter, alltoall, broadcast, reduce, gather and
    scatter. The root is the attribute `root` of `algo`, which `to_msccl_xml` adds. Without this
    attribute, the root is rank 0. The reader supports all step types. A program may be in place or
    out of place. A file that claims both must be correct in both cases. The reader ignores the
    protocol, the range of sizes, and the distribution of steps over threadblocks, because none of
    them changes a result. Connections hold any number of messages.

    The reader proves the program: in every possible order of its threadblocks, the program does not
    deadlock, has no race, and computes the collective.

    Raises `ScheduleError` with the gpu, threadblock, step and line for a wrong program, or for text
    that is not MSCCL XML. Raises `UnsupportedError` for an unsupported collective.

    >>> from unisono.schedule import Builder, Collective, to_msccl_xml
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2, parts=2), "halves")
    >>> b.reduce(0, 1, 1)
    >>> b.reduce(1, 0, 0)
    >>> b.next_round()
    >>> b.copy(0, 0, 1)
    >>> b.copy(1, 1, 0)
    >>> from_msccl_xml(to_msccl_xml(b.build())) == b.build()
    True
    """
    program = parse(text)
    collective = _collective(program)
    for gpu in program.gpus:
        for buffer in (Buffer.INPUT, Buffer.OUTPUT):
            _check_size(collective, gpu.number, buffer, gpu.chunks[buffer], gpu.where)
    schedules = [
        to_schedule(run_program(program, Buffers(collective, in_place=in_place)), program.name)
        for in_place, claimed in ((False, program.out_of_place), (True, program.in_place))
        if claimed
    ]
    if not schedules:
        raise ScheduleError("algo: expected inplace or outofplace to be 1, got 0 for both")
    return schedules[-1]


def _collective(program: Program) -> Collective:
    op, ranks = operation(program.collective), len(program.gpus)
    each = pieces(op, ranks)
    if program.chunks % each:
        raise ScheduleError(
            f"{program.collective} on {ranks} gpus: expected nchunksperloop to be "
            f"a multiple of {each}, got {program.chunks}"
        )
    root = program.root if op.rooted else None
    return Collective(op=op, ranks=ranks, parts=program.chunks // each, root=root)


def _check_size(collective: Collective, rank: int, buffer: Buffer, chunks: int, where: str) -> None:
    count = (
        collective.input_pieces(rank) if buffer is Buffer.INPUT else collective.output_pieces(rank)
    ) * collective.parts
    # If the rank has no input or output in this collective, the buffer is private memory of any
    # size.
    if count and chunks > count:
        raise ScheduleError(
            f"{where} has {chunks} {buffer} chunks, but {collective.op} gives it {count}"
        )


class _Connection:
    """First-in, first-out queue of the messages from one GPU to another on one channel."""

    def __init__(self) -> None:
        self.messages: deque[tuple[str, Sequence[Value], Clock]] = deque()


def run_program(program: Program, buffers: Buffers, room: int | None = None) -> SymbolicMachine:
    """Runs a program. A connection holds up to `room` messages, or any number if `room` is None."""
    interpreter = _ProgramInterpreter(program, buffers, room)
    interpreter.run()
    return interpreter.machine


class _ProgramInterpreter:
    def __init__(self, program: Program, buffers: Buffers, room: int | None) -> None:
        self.room = room
        self.machine = SymbolicMachine(buffers)
        self.blocks: list[MscclBlock] = []
        self.threads: list[Thread[MscclStep]] = []
        self.by_place: dict[tuple[int, int], Thread[MscclStep]] = {}
        self.flags: dict[int, list[tuple[int, Clock]]] = {}
        self.connections: dict[tuple[int, int, int], _Connection] = {}
        for gpu in program.gpus:
            for block in gpu.blocks:
                thread = Thread(
                    number=len(self.threads),
                    gpu=gpu.number,
                    steps=block.steps,
                    channel=block.channel,
                )
                self.blocks.append(block)
                self.threads.append(thread)
                self.by_place[gpu.number, block.number] = thread
                self.flags[thread.number] = []

    def run(self) -> None:
        run(self.threads, self._step, lambda thread: thread.steps[thread.at].where)
        for (src, dst, channel), connection in self.connections.items():
            if connection.messages:
                raise ScheduleError(
                    f"{connection.messages[0][0]} sends to gpu {dst} on channel {channel}, but no "
                    f"step there receives from gpu {src}"
                )

    def _step(self, thread: Thread[MscclStep], step: MscclStep) -> str | None:
        block = self.blocks[thread.number]
        if step.depends is not None:
            flag = self._flag(thread, *step.depends)
            if flag is None:
                return f"step {step.depends[1]} of threadblock {step.depends[0]}"
            thread.learn(flag)
        if step.sends and self.room is not None:
            assert block.send is not None
            ahead = self._connection(thread.gpu, block.send, block.channel).messages
            if len(ahead) >= self.room:
                return f"room in the connection to gpu {block.send} on channel {block.channel}"
        message: Sequence[Value] | None = None
        if step.receives:
            assert block.receive is not None
            connection = self._connection(block.receive, thread.gpu, block.channel)
            if not connection.messages:
                return f"a message from gpu {block.receive} on channel {block.channel}"
            sender, message, clock = connection.messages.popleft()
            if len(message) != step.chunks:
                raise ScheduleError(
                    f"{step.where} receives {step.chunks} chunks, but {sender} sends {len(message)}"
                )
            thread.learn(clock)
        if step.type != "nop":
            self._move(thread, block, step, message)
        if step.has_dependents:
            self.flags[thread.number].append((thread.at, dict(thread.clock)))
        return None

    def _move(
        self,
        thread: Thread[MscclStep],
        block: MscclBlock,
        step: MscclStep,
        message: Sequence[Value] | None,
    ) -> None:
        machine, where = self.machine, step.where
        results = []
        for i in range(step.chunks):
            operands = [] if message is None else [message[i]]
            if step.reads:
                cell = Cell(thread.gpu, step.src_buffer, step.src + i)
                operands.append(machine.read(thread, cell, where))
            target = Cell(thread.gpu, step.dst_buffer, step.dst + i)
            if step.type == "re":
                operands.append(machine.read(thread, target, where))
            value = operands[0]
            if len(operands) > 1:
                value = machine.reduce(thread.gpu, operands, where)
            if step.writes:
                value = machine.write(thread, target, value, where)
            elif len(operands) > 1:
                value = machine.keep(thread, value)
            results.append(value)
        if step.sends:
            assert block.send is not None
            connection = self._connection(thread.gpu, block.send, block.channel)
            connection.messages.append((where, results, dict(thread.clock)))

    def _flag(self, thread: Thread[MscclStep], other: int, after: int) -> Clock | None:
        """Returns the clock of the first flag that threadblock `other` has set at step `after` or
        later. A threadblock sets a flag after each step for which others wait. Returns None if
        there is no such flag yet.
        """
        flags = self.flags[self.by_place[thread.gpu, other].number]
        return next((clock for at, clock in flags if at >= after), None)

    def _connection(self, src: int, dst: int, channel: int) -> _Connection:
        return self.connections.setdefault((src, dst, channel), _Connection())
