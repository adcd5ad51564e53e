"""Reader of MSCCL++ execution plans, which runs a plan symbolically and converts the result to a
schedule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from unisono.errors import ScheduleError
from unisono.schedule.collective import Collective
from unisono.schedule.formats.buffers import Buffers, Cell, operation, pieces
from unisono.schedule.formats.mscclpp_file import (
    PACKETS,
    MscclppChannel,
    MscclppPlan,
    MscclppStep,
    Range,
    parse,
)
from unisono.schedule.formats.round_assignment import to_schedule
from unisono.schedule.formats.symbolic_machine import Clock, SymbolicMachine, Thread, Value, run
from unisono.schedule.schedule import Schedule

_REDUCING = frozenset(("re", "res", "rre", "rres", "glres", "repkt", "respkt", "recpkt", "recspkt"))
_FIRST_IS_PLAIN = frozenset(("repkt", "respkt", "recpkt", "recspkt"))
_READS_NO_PACKETS = frozenset(("ppkt", "cpkt"))


def from_mscclpp_json(text: str) -> Schedule:
    """Reads an MSCCL++ execution plan: JSON that the MSCCL++ DSL writes and its executor runs.

    The reader supports allreduce, allgather, reducescatter and alltoall with:

    - put, get, copy and reduce in all their fused forms;
    - packets, for which each reader waits;
    - switch channels (glres, gstore);
    - groups of threadblocks;
    - signals, semaphores and barriers.

    A `nop` synchronises the threads of a threadblock, as in MSCCL++. The threads see the data that
    a wait announces only after the next `nop`. A signal announces only data that were moved before
    the last `nop`. The reader runs a pipeline's operations once, over whole chunks, because the
    executor of Unisono cuts messages into blocks itself. The reader treats relaxed signals as
    ordinary signals, and puts over port channels as complete when issued. The reader ignores the
    reduction of the plan, because each call chooses its reduction.

    The reader rejects the operation gstorepkt, plans in the older format, and unsupported
    collectives.

    The reader proves the plan, as `from_msccl_xml` does. Raises `ScheduleError` or
    `UnsupportedError` with the gpu, threadblock and operation.

    >>> from unisono.schedule import Builder, Collective, to_mscclpp_json
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "one_shot")
    >>> b.reduce(0, 0, 1)
    >>> b.reduce(1, 0, 0)
    >>> from_mscclpp_json(to_mscclpp_json(b.build())) == b.build()
    True
    """
    plan = parse(text)
    interpreter = _PlanInterpreter(plan, Buffers(_collective(plan), in_place=plan.in_place))
    interpreter.run()
    return to_schedule(interpreter.machine, plan.name)


def _collective(plan: MscclppPlan) -> Collective:
    """Returns the collective of a plan. Raises `ScheduleError` for a wrong number of chunks."""
    op, ranks = operation(plan.collective), len(plan.sizes)
    each = pieces(op, ranks)
    if plan.chunks < 1 or plan.chunks % each:
        raise ScheduleError(
            f"{op} on {ranks} gpus: expected a multiple of {each} chunks, got {plan.chunks}"
        )
    root = 0 if op.rooted else None
    return Collective(op=op, ranks=ranks, parts=plan.chunks // each, root=root)


@dataclass(slots=True)
class _ThreadblockClocks:
    """Clocks that synchronise the threads of a threadblock."""

    published: Clock = field(default_factory=dict)
    """Clock at the last `nop`. After a data operation, a signal announces only the events before
    this `nop`.
    """
    received: Clock = field(default_factory=dict)
    """Clock of the waits since the last `nop`. All threads see these events only after the next
    `nop`.
    """
    moving: bool = False
    at_barrier: bool = False


@dataclass(slots=True)
class _Barrier:
    clocks: list[Clock] = field(default_factory=list)
    leaving: int = 0


class _PlanInterpreter:
    def __init__(self, plan: MscclppPlan, buffers: Buffers) -> None:
        self.plan = plan
        self.machine = SymbolicMachine(buffers)
        self.threads = [
            Thread(number=i, gpu=gpu, steps=steps) for i, (gpu, _, steps) in enumerate(plan.blocks)
        ]
        self.blocks = [_ThreadblockClocks() for _ in self.threads]
        self.signals: dict[MscclppChannel, deque[Clock]] = {}
        self.packets: dict[Cell, Clock] = {}
        self.barriers: dict[tuple[int, int], _Barrier] = {}
        self.tokens: dict[tuple[int, int], deque[Clock]] = {
            (gpu, i): deque({} for _ in range(min(value, len(self.threads))))
            for gpu, values in enumerate(plan.semaphores)
            for i, value in enumerate(values)
        }

    def run(self) -> None:
        run(self.threads, self._step, lambda thread: thread.steps[thread.at].where)

    def _step(self, thread: Thread[MscclppStep], step: MscclppStep) -> str | None:
        block = self.blocks[thread.number]
        if step.name == "nop":
            self._synchronise(thread, block)
        elif step.name in ("signal", "rlxsignal"):
            self._signal(thread, block, step)
        elif step.name in ("wait", "rlxwait"):
            return self._wait(block, step)
        elif step.name == "barrier":
            return self._barrier(thread, block, step)
        elif step.name in ("sem_acquire", "sem_release"):
            return self._semaphore(thread, block, step)
        elif step.name != "flush":
            return self._data(thread, block, step)
        return None

    def _synchronise(self, thread: Thread[MscclppStep], block: _ThreadblockClocks) -> None:
        thread.learn(block.received)
        block.published, block.received, block.moving = dict(thread.clock), {}, False

    def _announced(self, thread: Thread[MscclppStep], block: _ThreadblockClocks) -> Clock:
        return dict(block.published if block.moving else thread.clock)

    def _signal(
        self, thread: Thread[MscclppStep], block: _ThreadblockClocks, step: MscclppStep
    ) -> None:
        for channel in step.channels:
            self.signals.setdefault(channel.other_end, deque()).append(
                self._announced(thread, block)
            )

    def _wait(self, block: _ThreadblockClocks, step: MscclppStep) -> str | None:
        for channel in step.channels:
            if not self.signals.get(channel):
                return (
                    f"a signal from gpu {channel.peer} on {channel.kind} channel {channel.number}"
                )
        for channel in step.channels:
            _merge(block.received, self.signals[channel].popleft())
        return None

    def _semaphore(
        self, thread: Thread[MscclppStep], block: _ThreadblockClocks, step: MscclppStep
    ) -> str | None:
        keys = [(thread.gpu, number) for number in step.semaphores]
        for key in keys:
            if key not in self.tokens:
                raise ScheduleError(
                    f"{step.where}: expected a semaphore of the plan, got number {key[1]}"
                )
            if step.name == "sem_acquire" and not self.tokens[key]:
                return f"semaphore {key[1]}"
        for key in keys:
            if step.name == "sem_acquire":
                _merge(block.received, self.tokens[key].popleft())
            else:
                self.tokens[key].append(self._announced(thread, block))
        return None

    def _barrier(
        self, thread: Thread[MscclppStep], block: _ThreadblockClocks, step: MscclppStep
    ) -> str | None:
        number, count = step.barrier
        barrier = self.barriers.setdefault((thread.gpu, number), _Barrier())
        if not block.at_barrier:
            if barrier.leaving:
                return f"all threadblocks to leave barrier {number}"
            self._synchronise(thread, block)
            barrier.clocks.append(dict(thread.clock))
            block.at_barrier = True
            if len(barrier.clocks) == count:
                barrier.leaving = count
        if not barrier.leaving:
            return f"{count - len(barrier.clocks)} more threadblocks at barrier {number}"
        for clock in barrier.clocks:
            thread.learn(clock)
        block.published, block.at_barrier = dict(thread.clock), False
        barrier.leaving -= 1
        if not barrier.leaving:
            barrier.clocks.clear()
        return None

    def _data(
        self, thread: Thread[MscclppStep], block: _ThreadblockClocks, step: MscclppStep
    ) -> str | None:
        self._check(step)
        for source in self._packets_read(step):
            for i in range(source.length):
                for cell in source.cells(i):
                    if cell not in self.packets:
                        return f"a packet in {cell}"
                    thread.learn(self.packets[cell])
        if step.name in _REDUCING:
            for i in range(step.targets[0].length):
                values = [self._read(thread, s, i, step) for s in step.sources]
                operands = [value for group in values for value in group]
                result = self.machine.reduce(thread.gpu, operands, step.where)
                for target in step.targets:
                    result = self._write(thread, target, i, result, step)
        else:
            sources = step.sources * (len(step.targets) if len(step.sources) == 1 else 1)
            for source, target in zip(sources, step.targets, strict=True):
                for i in range(target.length):
                    (value,) = self._read(thread, source, i, step)
                    self._write(thread, target, i, value, step)
        if step.name in ("pws", "pwsf"):
            self._signal(thread, block, step)
        block.moving = block.moving or step.kind != "port"
        return None

    def _check(self, step: MscclppStep) -> None:
        if not step.sources or not step.targets:
            raise ScheduleError(f"{step.where} needs at least one source and one target")
        if step.name not in _REDUCING and len(step.sources) not in (1, len(step.targets)):
            raise ScheduleError(
                f"{step.where} has {len(step.sources)} sources for {len(step.targets)} targets"
            )
        lengths = {r.length for r in (*step.sources, *step.targets)}
        if len(lengths) > 1:
            raise ScheduleError(
                f"{step.where} needs ranges of one length, got {sorted(lengths)} chunks"
            )
        for r in (*step.sources, *step.targets):
            for gpu in r.gpus:
                if r.start + r.length > self._size(gpu, r):
                    raise ScheduleError(
                        f"{step.where} needs {r.buffer}[{r.start}:{r.start + r.length}] of gpu "
                        f"{gpu}, which has {self._size(gpu, r)} chunks"
                    )

    def _size(self, gpu: int, r: Range) -> int:
        """Returns the number of chunks in a buffer. If the plan gives size 0, returns the size that
        the collective demands, because an in-place plan may give a size only for the input or only
        for the output.
        """
        size = self.plan.sizes[gpu][r.buffer]
        return size or (self.machine.buffers.size(gpu, r.buffer) or 0)

    def _packets_read(self, step: MscclppStep) -> tuple[Range, ...]:
        if step.name not in PACKETS or step.name in _READS_NO_PACKETS:
            return ()
        return step.sources[1:] if step.name in _FIRST_IS_PLAIN else step.sources

    def _read(
        self, thread: Thread[MscclppStep], r: Range, i: int, step: MscclppStep
    ) -> list[Value]:
        return [self.machine.read(thread, cell, step.where) for cell in r.cells(i)]

    def _write(
        self, thread: Thread[MscclppStep], r: Range, i: int, value: Value, step: MscclppStep
    ) -> Value:
        cells = sorted(r.cells(i), key=lambda cell: cell.gpu != thread.gpu)
        for cell in cells:
            value = self.machine.write(thread, cell, value, step.where)
            if step.name in PACKETS:
                self.packets[cell] = dict(thread.clock)
        return value


def _merge(clock: Clock, other: Clock) -> None:
    for thread, steps in other.items():
        clock[thread] = max(steps, clock.get(thread, 0))
