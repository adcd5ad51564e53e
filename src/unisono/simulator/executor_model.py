"""Model of the executor between hosts: each rank runs its plan block by block, record by record.

A rank runs its records in order and stops at each wait, which also delays its later sends. Each
reader of a post gets one message. The messages between two ranks form a stream. A rank reuses a
staging buffer only after all its readers have acknowledged it. An acknowledgement travels with the
reader's next message or in a message of its own. `csrc/execution/executor.cc` and
`csrc/execution/remote_slots.cc` work in the same way. In this model, copies and reductions take no
time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import whole_chunks
from unisono.schedule import Code, ExecutionPlan, lead_of, lower
from unisono.simulator.job import Blocks, Job
from unisono.simulator.result import TaskKind
from unisono.topology import Floats, Ints, ints, starts_of

HEADER_BYTES = 80
"""Size of a message header, as in `csrc/transport/transport.h`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Executed:
    """Tasks as columns, in the form of `native.simulator_messages`, but with sizes in bytes instead
    of chunks. `needs` are the tasks that each task waits for. A negative number -1 - r means the
    gate of rank r (the task that must end before the rank takes part)."""

    kind: NDArray[np.uint8]
    round: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    bytes: Floats
    needs: Ints
    starts: Ints
    after: NDArray[np.int32]


def executed(job: Job, blocks: Blocks, *, gates: bool) -> Executed:
    """Returns the tasks of a job that runs block by block. All ranks are on different hosts."""
    plans = lower(job.schedule)
    part_bytes = job.nbytes / max(1, whole_chunks(job.schedule.collective))
    count = max(1, ceil(part_bytes / blocks.block_bytes - 1e-9))
    lengths = [
        max(0.0, min(blocks.block_bytes, part_bytes - b * blocks.block_bytes)) for b in range(count)
    ]
    log = _Log()
    for plan in plans:
        _RankRun(plan, log, blocks, lengths, gates).run()
    return log.columns()


@dataclass(slots=True)
class _Task:
    kind: TaskKind
    round: int
    src: int
    dst: int
    nbytes: float = 0.0
    needs: list[int] = field(default_factory=list)
    after: int = -1
    awaits: tuple[int, int] | None = None
    """The peer that this task waits for, and the progress that the peer must have reached."""


class _Log:
    """All tasks, and the progress that each rank has sent to every other rank."""

    def __init__(self) -> None:
        self.tasks: list[_Task] = []
        self._sent_progress: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(
            lambda: ([], [])
        )

    def add(self, task: _Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def send(self, task: _Task, progress: int) -> None:
        """Adds a message, to be sent after the previous message of its stream."""
        progresses, numbers = self._sent_progress[task.src, task.dst]
        task.after = numbers[-1] if numbers else -1
        progresses.append(progress)
        numbers.append(self.add(task))

    def columns(self) -> Executed:
        for task in self.tasks:
            if task.awaits is not None:
                peer, progress = task.awaits
                progresses, numbers = self._sent_progress[peer, task.dst]
                task.needs.append(numbers[bisect_left(progresses, progress)])
        self._drop_unneeded_acknowledgements()
        tasks = self.tasks
        return Executed(
            kind=np.array([task.kind for task in tasks], np.uint8),
            round=np.array([task.round for task in tasks], np.int32),
            src=np.array([task.src for task in tasks], np.int32),
            dst=np.array([task.dst for task in tasks], np.int32),
            bytes=np.array([task.nbytes for task in tasks], np.float64),
            needs=ints([need for task in tasks for need in task.needs]),
            starts=starts_of(ints([len(task.needs) for task in tasks])),
            after=np.array([task.after for task in tasks], np.int32),
        )

    def _drop_unneeded_acknowledgements(self) -> None:
        """Replaces acknowledgements that no rank waits for by tasks that take no time."""
        needed = {need for task in self.tasks for need in task.needs}
        for number, task in enumerate(self.tasks):
            if task.nbytes == HEADER_BYTES and number not in needed:
                task.kind, task.dst, task.nbytes = TaskKind.JOIN, task.src, 0.0


class _RankRun:
    """Runs one rank's records from first to last. The attributes have the same names as in the C++
    executor."""

    def __init__(
        self, plan: ExecutionPlan, log: _Log, blocks: Blocks, lengths: list[float], gates: bool
    ) -> None:
        self.plan, self.log, self.lengths = plan, log, lengths
        self.rows = plan.table[["code", "peer", "value", "round", "posted"]].tolist()
        self.depth = blocks.depth
        self.lead = min(blocks.lead, blocks.depth - 1, len(lengths) - 1, plan.rounds - 1)
        self.leads = [lead_of(round_, plan.rounds, self.lead) for round_ in range(plan.rounds)]
        self.readers_of = {
            post: [(rank, len(list(slots))) for rank, slots in groupby(sorted(of), lambda x: x)]
            for post, of in self._readers().items()
        }
        self.readers = sorted({reader.rank for reader in plan.readers})
        self.sources = sorted({row[1] for row in self.rows if row[0] == Code.WAIT})
        self.seen: dict[int, int] = defaultdict(int)
        # For each block, the progress that its readers must report before the slots are reused.
        self.awaited: list[int] = []
        # (peer, block): blocks that this rank has read from a peer, but not yet acknowledged.
        self.unacknowledged: list[tuple[int, int]] = []
        self.now = self._join([-1 - plan.rank] if gates else [])

    def _readers(self) -> dict[int, list[int]]:
        found = defaultdict(list)
        for reader in self.plan.readers:
            found[reader.post].append(reader.rank)
        return found

    def run(self) -> None:
        """Adds the tasks of all blocks to the log."""
        for step in range(len(self.lengths) + self.lead):
            if self.plan.num_slots and self.depth <= step < len(self.lengths):
                for reader in self.readers:
                    self._wait(reader, self.awaited[step - self.depth])
            self._records(step)
            if step >= self.lead:
                self._end_block(step - self.lead, (step + 1) * self.plan.stages)

    def _records(self, step: int) -> None:
        base, stages = step * self.plan.stages, self.plan.stages
        for code, peer, value, round_, posted in self.rows:
            block = step - self.lead + self.leads[round_]
            if not 0 <= block < len(self.lengths):
                continue
            if code == Code.WAIT:
                earlier = self.leads[posted] - self.leads[round_]
                self._wait(peer, base + value - earlier * stages)
            elif code == Code.POST:
                for reader, slots in self.readers_of.get(value, ()):
                    self._send(reader, base + value, round_, slots * self.lengths[block])

    def _join(self, needs: list[int], awaits: tuple[int, int] | None = None) -> int:
        me = self.plan.rank
        task = _Task(TaskKind.JOIN, -1, me, me, needs=needs, awaits=awaits)
        return self.log.add(task)

    def _wait(self, peer: int, progress: int) -> None:
        if self.seen[peer] >= progress:
            return
        self.seen[peer] = progress
        self.now = self._join([self.now], (peer, progress))

    def _send(self, peer: int, progress: int, round_: int, nbytes: float) -> None:
        self.unacknowledged = [
            unacknowledged for unacknowledged in self.unacknowledged if unacknowledged[0] != peer
        ]
        task = _Task(
            TaskKind.MESSAGE, round_, self.plan.rank, peer, HEADER_BYTES + nbytes, [self.now]
        )
        self.log.send(task, progress)

    def _end_block(self, block: int, progress: int) -> None:
        self.awaited.append(progress)
        self.unacknowledged += [(source, block) for source in self.sources]
        most = min((self.depth + 1) // 2, self.depth - self.lead)
        while due := [peer for peer, read in self.unacknowledged if block - read + 1 >= most]:
            self._send(due[0], progress, self.plan.rounds - 1, 0.0)
