"""Converts jobs to tasks of the engine: messages, reductions, computation, and dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import whole_chunks
from unisono.errors import UnsupportedError
from unisono.simulator.conditions import Order, Traffic
from unisono.simulator.executor_model import executed
from unisono.simulator.in_network import Trees, trees_of
from unisono.simulator.job import AnyJob, Blocks, Compute, Job, Message
from unisono.simulator.message_columns import message_columns, placed, reductions_in_switches
from unisono.simulator.paths import NetworkPaths, PathBuilder
from unisono.simulator.result import TaskKind
from unisono.topology import Floats, Ints, distinct, ints, starts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Tasks:
    """Tasks as columns, in the form that the engine expects; see `csrc/simulator/event_loop.h`.
    `job`, `kind` and the fields after `kind` are only for `Steps`."""

    path: NDArray[np.int32]
    bytes: Floats
    needs: NDArray[np.int32]
    needs_starts: Ints
    after: NDArray[np.int32]
    job: NDArray[np.int32]
    kind: NDArray[np.uint8]
    round: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    channel: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.path)


class TaskBuilder:
    """Collects the tasks of jobs, numbered consecutively across jobs."""

    def __init__(self, network: NetworkPaths, paths: PathBuilder, jobs: Sequence[AnyJob]) -> None:
        self.network = network
        self.paths = paths
        self.jobs = jobs
        self.size = 0
        self._blocks: list[Tasks] = []
        self._wanted = {name for job in jobs for name in job.after}
        self._done: dict[str, dict[int, int]] = {}  # the last task of each rank in each job
        self._streams = network.conditions.order is Order.STREAMS
        blocks = any(isinstance(job, Job) and job.blocks is not None for job in jobs)
        self._ordered = blocks or network.conditions.order is Order.PROGRAM
        if blocks and network.conditions.order is not Order.NONE:
            raise ValueError(
                "simulate: a job that runs in blocks has its own order; set conditions.order "
                "to NONE"
            )

    def add(self, number: int) -> None:
        """Adds the tasks of one job. The jobs that its `after` names must already be added."""
        job = self.jobs[number]
        gates = self._gates(number, job)
        if isinstance(job, Compute):
            self._compute(number, job, gates)
        elif isinstance(job, Message):
            self._message(number, job, gates)
        elif job.blocks is not None:
            self._executed(number, job, job.blocks, gates)
        else:
            self._collective(number, job, gates)

    def traffic(self, streams: Sequence[Traffic], first_port: int) -> None:
        """Adds endless streams of other traffic. Each stream has its own resource, which limits its
        rate."""
        network = self.network
        for number, stream in enumerate(streams):
            src, dst = ints([stream.src]), ints([stream.dst])
            if stream.src == stream.dst or not all(
                0 <= rank < network.topology.num_ranks for rank in (stream.src, stream.dst)
            ):
                raise ValueError(
                    f"traffic needs two different ranks of the network, got {stream.src} and "
                    f"{stream.dst}"
                )
            ((links, weights),) = network.routes(src, dst, ints([0]))
            path = self.paths.along(links, weights, src, dst, cap=ints([first_port + number]))
            self._block(
                len(self.jobs),
                TaskKind.TRAFFIC,
                path=ints([path]),
                size=np.array([np.inf]),
                src=src,
                dst=dst,
            )

    # ---- gates: tasks that must end before a rank takes part in a job

    def _gates(self, number: int, job: AnyJob) -> dict[int, int] | None:
        """Returns each rank's gate, the task that must end before the rank takes part. Returns None
        if no rank waits."""
        network = self.network
        enters = network.of_endpoints("enters_s")
        members = ints(list(job.members))
        if len(members) and not 0 <= members.min() <= members.max() < network.topology.num_ranks:
            raise UnsupportedError(
                f"{job.name or 'the schedule'} needs ranks {members.min()} to "
                f"{members.max()}, but {network.topology.name} has "
                f"{network.topology.num_ranks} ranks"
            )
        waits = np.maximum(enters[members], job.start_s)
        if not job.after and not waits.any():
            return None
        needs: list[int] = []
        counts = np.zeros(len(members), np.int64)
        for i, rank in enumerate(job.members):
            found = [self._done[name][rank] for name in job.after if rank in self._done[name]]
            needs += found
            counts[i] = len(found)
        late = self._late(number, members, waits)
        starts = starts_of(counts)
        needed = np.insert(ints(needs), starts[1:], late)
        first = self._block(
            number,
            TaskKind.JOIN,
            path=np.full(len(members), self.paths.instant),
            src=members,
            dst=members,
            needs=needed,
            needs_starts=starts + np.arange(len(starts)),
        )
        return dict(zip(job.members, range(first, first + len(members)), strict=True))

    def _late(self, number: int, members: Ints, waits: Floats) -> Ints:
        first = self.paths.delays(waits)
        path = first + np.arange(len(members))
        task = self._block(number, TaskKind.JOIN, path=path, src=members, dst=members)
        return task + np.arange(len(members))

    def _compute(self, number: int, job: Compute, gates: dict[int, int] | None) -> None:
        members = ints(list(job.members))
        seconds = job.seconds * self.network.of_endpoints("slowdown")[members]
        path = self.paths.delays(seconds) + np.arange(len(members))
        needs = ints([] if gates is None else [gates[rank] for rank in job.members])
        starts = np.arange(len(members) + 1) * (gates is not None)
        first = self._block(
            number,
            TaskKind.COMPUTE,
            path=path,
            src=members,
            dst=members,
            needs=needs,
            needs_starts=ints(starts),
        )
        self._done[job.name] = dict(
            zip(job.members, range(first, first + len(members)), strict=True)
        )

    def _message(self, number: int, job: Message, gates: dict[int, int] | None) -> None:
        src, dst = (np.array([rank], np.int32) for rank in job.members)
        size = np.array([job.nbytes], np.float64)
        # A value without bytes crosses no link: it is only a dependency.
        kind = TaskKind.MESSAGE if job.nbytes else TaskKind.JOIN
        columns = np.array([kind], np.uint8), src, dst, np.zeros(1, np.int32)
        path = self._paths_of(*columns, size, None, np.empty(0, np.bool_))
        if (model := self.network.conditions.messages) is not None and job.nbytes:
            size = model.load(size)
        task = self._block(
            number,
            kind,
            path=ints(path),
            size=size,
            src=ints(src),
            dst=ints(dst),
            needs=None if gates is None else ints([gates[job.src]]),
            needs_starts=None if gates is None else ints([0, 1]),
        )
        self._done[job.name] = {job.src: task, job.dst: task}

    # ---- collectives

    def _collective(self, number: int, job: Job, gates: dict[int, int] | None) -> None:
        network = self.network
        trees = trees_of(job, network) if network.conditions.in_network else None
        ports = np.isfinite(network.of_endpoints("reduce_Bps"))
        members = ints(list(job.members))
        kind, round_, src, dst, channel, chunks, needs, starts, after = message_columns(
            job,
            trees,
            reductions=bool(ports[members].any()),
            gates=gates is not None,
            order=Order.NONE if self._streams else network.conditions.order,
        )
        if trees is not None:
            chunks[kind == TaskKind.MESSAGE] = trees.chunks
        size = chunks
        size *= job.nbytes / max(1, whole_chunks(job.schedule.collective))
        if job.ranks is not None:
            src, dst = placed(src, members), placed(dst, members)
        path = self._paths_of(kind, src, dst, channel, size, trees, ports)
        if (model := network.conditions.messages) is not None:
            sent = (kind == TaskKind.MESSAGE) & (src != dst)
            size[sent] = model.load(size[sent])
        if trees is not None:  # reductions in switches cost the ranks nothing
            path[reductions_in_switches(trees, kind, needs, starts)] = self.paths.instant
        if self._ordered and not len(after):
            after = np.full(len(kind), -1, np.int32)
        tasks = Tasks(
            path=path,
            bytes=size,
            needs=needs,
            needs_starts=starts,
            after=after,
            job=np.full(len(kind), number, np.int32),
            kind=kind,
            round=round_,
            src=src,
            dst=dst,
            channel=channel,
        )
        self._append_tasks(number, job, tasks, gates)

    def _executed(
        self, number: int, job: Job, blocks: Blocks, gates: dict[int, int] | None
    ) -> None:
        """Adds the tasks of a job that runs in blocks, from the ranks' execution plans."""
        done = executed(job, blocks, gates=gates is not None)
        members = np.array(job.members, np.int32)
        src, dst = members[done.src], members[done.dst]
        channel = np.zeros(len(src), np.int32)
        path = self._paths_of(done.kind, src, dst, channel, done.bytes, None, np.empty(0, np.bool_))
        tasks = Tasks(
            path=path,
            bytes=done.bytes,
            needs=done.needs.astype(np.int32),
            needs_starts=done.starts,
            after=done.after,
            job=np.full(len(path), number, np.int32),
            kind=done.kind,
            round=done.round,
            src=src,
            dst=dst,
            channel=channel,
        )
        self._append_tasks(number, job, tasks, gates)

    def _append_tasks(
        self, number: int, job: Job, tasks: Tasks, gates: dict[int, int] | None
    ) -> None:
        """Adds a job's tasks, which refer to each other by their positions in the job. A negative
        number -1 - m in `needs` means the gate (see `_gates`) of the job's member m."""
        needs, after = tasks.needs, tasks.after
        if self.size:
            needs = np.where(needs < 0, needs, needs + np.int32(self.size))
            after = np.where(after < 0, after, after + np.int32(self.size))
        if gates is not None:
            gate = np.array([gates[rank] for rank in job.members], np.int32)
            own = needs < 0
            needs[own] = gate[-1 - needs[own]]
        first = self._append(replace(tasks, needs=needs, after=after))
        if job.name in self._wanted:
            self._end(number, job, first, gates)

    def _paths_of(
        self,
        kind: NDArray[np.uint8],
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        channel: NDArray[np.int32],
        size: Floats,
        trees: Trees | None,
        ports: NDArray[np.bool_],
    ) -> NDArray[np.int32]:
        """Returns the path of each task. Messages share a path if they have the same ranks, channel
        and regime of the link model."""
        path = np.full(len(kind), self.paths.instant, np.int32)
        sends = (kind == TaskKind.MESSAGE) & (src != dst)
        if trees is not None:
            number = np.cumsum(kind == TaskKind.MESSAGE) - 1
            joined = (kind == TaskKind.MESSAGE) & trees.joined[number]
            path[joined] = trees.add_to(self.paths)[number[joined]]
            sends &= ~joined
        rows = np.flatnonzero(sends)
        if len(rows):
            num_channels = int(channel[rows].max()) + 1
            n = self.network.topology.num_ranks
            keys = (src[rows].astype(np.int64) * n + dst[rows]) * num_channels + channel[rows]
            model = self.network.conditions.messages
            regimes = 1 if model is None else len(model.regimes)
            if model is not None:
                keys = keys * regimes + model.regime_of(size[rows])
            keys, which = distinct(keys)
            keys, regime = np.divmod(keys, regimes)
            pair, channels = np.divmod(keys, num_channels)
            wait_s = None if model is None else model.delays_s[regime]
            path[rows] = self.paths.messages(pair // n, pair % n, channels, wait_s) + which
        rows = np.flatnonzero(kind == TaskKind.REDUCTION)
        rows = rows[ports[dst[rows]]]
        if len(rows):
            ranks, which = np.unique(dst[rows], return_inverse=True)
            path[rows] = self.paths.through(self.network.port(2, ints(ranks))) + which
        return path

    def _end(self, number: int, job: Job, first: int, gates: dict[int, int] | None) -> None:
        """Adds a last task for each rank, which waits for everything that the rank sends and
        receives."""
        block = self._blocks[-1]
        rows = np.flatnonzero(block.src >= 0)
        both = np.concatenate([block.src[rows], block.dst[rows]])
        task = np.concatenate([rows, rows]) + first
        order = np.argsort(both, kind="stable")
        counts = np.bincount(both, minlength=self.network.topology.num_ranks)
        members = ints(list(job.members))
        groups = np.split(task[order], np.cumsum(counts)[:-1])
        lists = [np.unique(groups[rank]) for rank in job.members]
        if gates is not None:
            lists = [
                np.append(of, gates[rank]) for of, rank in zip(lists, job.members, strict=True)
            ]
        end = self._block(
            number,
            TaskKind.JOIN,
            path=np.full(len(members), self.paths.instant),
            src=members,
            dst=members,
            needs=ints(np.concatenate(lists)),
            needs_starts=starts_of(ints([len(of) for of in lists])),
        )
        self._done[job.name] = dict(zip(job.members, range(end, end + len(members)), strict=True))

    # ---- columns

    def _block(
        self,
        number: int,
        kind: TaskKind,
        *,
        path: Ints,
        src: Ints,
        dst: Ints,
        size: Floats | None = None,
        needs: Ints | None = None,
        needs_starts: Ints | None = None,
    ) -> int:
        count = len(path)
        none = np.full(count, -1, np.int32)
        return self._append(
            Tasks(
                path=path.astype(np.int32),
                bytes=np.zeros(count) if size is None else size,
                needs=ints([] if needs is None else needs).astype(np.int32),
                needs_starts=np.zeros(count + 1, np.int64)
                if needs_starts is None
                else needs_starts,
                after=none if self._ordered else none[:0],
                job=np.full(count, number, np.int32),
                kind=np.full(count, kind, np.uint8),
                round=none,
                src=src.astype(np.int32),
                dst=dst.astype(np.int32),
                channel=np.zeros(count, np.int32),
            )
        )

    def _append(self, block: Tasks) -> int:
        first = self.size
        self._blocks.append(block)
        self.size += len(block)
        return first

    def build(self) -> Tasks:
        """Returns all tasks."""
        tasks = self._joined()
        return replace(tasks, after=self._in_streams(tasks)) if self._streams else tasks

    def _in_streams(self, tasks: Tasks) -> NDArray[np.int32]:
        """Returns the predecessor of each message: the previous message from the same source to the
        same destination."""
        firsts = [job.first_round if isinstance(job, Job) else 0 for job in self.jobs]
        rows = np.flatnonzero((tasks.kind == TaskKind.MESSAGE) & (tasks.src != tasks.dst))
        src, dst, job = (column[rows] for column in (tasks.src, tasks.dst, tasks.job))
        place = tasks.round[rows] + np.array(firsts, np.int64)[job]
        rows = rows[np.lexsort((rows, place, dst, src))]
        same = tasks.src[rows[1:]] == tasks.src[rows[:-1]]
        same &= tasks.dst[rows[1:]] == tasks.dst[rows[:-1]]
        after = np.full(len(tasks), -1, np.int32)
        after[rows[1:][same]] = rows[:-1][same]
        return after

    def _joined(self) -> Tasks:
        if len(self._blocks) == 1:
            return self._blocks[0]
        lengths = np.concatenate([np.diff(block.needs_starts) for block in self._blocks])
        names = [name for name in Tasks.__dataclass_fields__ if name != "needs_starts"]
        columns = {
            name: np.concatenate([getattr(block, name) for block in self._blocks] or [np.empty(0)])
            for name in names
        }
        return Tasks(needs_starts=starts_of(lengths), **columns)
