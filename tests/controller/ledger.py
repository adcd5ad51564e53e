"""Simulated transfers of a world's ranks, and a ledger of the jobs that each rank has begun."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.controller.transfers.transfer import Job


@dataclass(frozen=True)
class Submission:
    """A rank's submission of a tensor: the `nth` submission of this name, from 0."""

    name: str
    nth: int


@dataclass(frozen=True)
class Part:
    """What one rank contributes to a job. `held` has the rank's own submissions. It is empty if the
    rank contributes nothing, because it has joined (`JoinAll`).
    """

    names: tuple[str, ...]
    operation: str
    op: str
    root: int
    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] = ()
    held: tuple[Submission, ...] = ()

    def kind(self) -> tuple[object, ...]:
        """Returns the properties that must be equal on all ranks."""
        if self.operation == "all_gather" and len(set(self.lengths)) > 1:
            shapes = tuple(shape[1:] for shape in self.shapes)
        else:
            shapes = self.shapes
        return self.names, self.operation, self.op, self.root, shapes, self.lengths


@dataclass
class Entry:
    """A job of all ranks. `parts` has the contribution of each rank that has begun the job. It is
    None for a rank that was not ready.
    """

    size: int
    parts: dict[int, Part | None] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """True if all ranks have begun the job."""
        return len(self.parts) == self.size

    @property
    def ran(self) -> bool:
        """True if each rank that has begun the job was ready for it."""
        return all(part is not None for part in self.parts.values())


@dataclass
class Ledger:
    """Records of the jobs of all ranks. Decided jobs begin when all ranks are known to be ready.
    Voted jobs run only if all ranks turn out to be ready.
    """

    size: int
    paired: bool = True
    """True if the `nth` submission of a name on one rank must run in the same job as the `nth`
    submission on each other rank. False in a world whose ranks join.
    """
    decided: list[Entry] = field(default_factory=list)
    voted: list[Entry] = field(default_factory=list)
    runs: Counter[tuple[int, Submission]] = field(default_factory=Counter)
    """Number of runs of each submission, by rank and submission."""
    finished: list[Part] = field(default_factory=list)
    """Rank 0's contributions to the jobs that ran, in the order in which the jobs ended."""

    def begin(self, jobs: list[Entry], rank: int, part: Part | None) -> Entry:
        """Records that `rank` begins its next job in the list `jobs`."""
        position = next((i for i, entry in enumerate(jobs) if rank not in entry.parts), len(jobs))
        if position == len(jobs):
            jobs.append(Entry(self.size))
        entry = jobs[position]
        entry.parts[rank] = part
        if entry.completed and entry.ran:
            self._run(position, entry)
        return entry

    def _run(self, position: int, entry: Entry) -> None:
        parts = {rank: part for rank, part in entry.parts.items() if part is not None}
        kinds = {part.kind() for part in parts.values()}
        assert len(kinds) == 1, f"job {position} differs between the ranks: {parts}"
        held = {part.held for part in parts.values() if part.held}
        assert len(held) == 1 or not self.paired, (
            f"job {position} pairs submissions of different passes: {parts}"
        )
        for rank, part in parts.items():
            self.runs.update((rank, each) for each in part.held)
        self.finished.append(parts[0])


class SimulatedPending:
    """A job that one rank has begun. `end_ns` is the time at which the simulated link has
    transferred the job's data.
    """

    def __init__(self, entry: Entry, end_ns: int = 0) -> None:
        self.entry = entry
        self.end_ns = end_ns

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns at once, since a simulated job needs no time."""
        assert self.entry.completed, "waits for a job that other ranks have not begun"

    def is_completed(self) -> bool:
        """True if all ranks have begun the job."""
        return self.entry.completed

    @property
    def ran(self) -> bool:
        """True if each rank that has begun the job was ready for it."""
        return self.entry.ran

    def times_ns(self) -> tuple[int, int]:
        """Returns the times at which the job's data begin and end to move; both are `end_ns`."""
        return self.end_ns, self.end_ns


class SimulatedTransfer:
    """A simulated transfer of one rank, which identifies arrays by their ids."""

    def __init__(self, rank: int, ledger: Ledger, now_ns: Callable[[], int] = lambda: 0) -> None:
        self.now_ns = now_ns
        self.free_ns = 0
        """Time at which the simulated link is free."""
        self.rank = rank
        self.ledger = ledger
        self.submissions: dict[int, tuple[Submission, Any]] = {}

    def know(self, array: Any, submission: Submission) -> None:
        """Records the submission that an array belongs to, and keeps the array alive."""
        self.submissions[id(array)] = submission, array

    def begin(self, job: Job) -> SimulatedPending:
        """Begins a decided job."""
        return SimulatedPending(self.ledger.begin(self.ledger.decided, self.rank, self.part(job)))

    def begin_absent(self, names: Sequence[str], job: Job) -> SimulatedPending:
        """Begins a decided job to which this rank contributes nothing."""
        part = self._part(job, tuple(names), ())
        return SimulatedPending(self.ledger.begin(self.ledger.decided, self.rank, part))

    def prepare(self, job: Job) -> SimulatedVotedJob:
        """Prepares a voted job, which runs only if all ranks are ready."""
        return SimulatedVotedJob(self, job)

    def begin_voted(self, part: Part | None) -> SimulatedPending:
        """Begins the next voted job. `part` is this rank's contribution, or None if the rank is not
        ready.
        """
        entry = self.ledger.begin(self.ledger.voted, self.rank, part)
        if part is not None:
            elements = sum(math.prod(shape) for shape in part.shapes)
            self.free_ns = max(self.free_ns, self.now_ns()) + 20 + 10 * elements
        return SimulatedPending(entry, self.free_ns)

    def close(self) -> None:
        """Does nothing, since a simulated transfer has no resources."""

    def part(self, job: Job) -> Part:
        """Returns this rank's contribution to a job. Submissions stand for the arrays."""
        held = tuple(self.submissions[id(array)][0] for array in job.arrays)
        return self._part(job, tuple(each.name for each in held), held)

    @staticmethod
    def _part(job: Job, names: tuple[str, ...], held: tuple[Submission, ...]) -> Part:
        shapes = tuple(tuple(array.shape) for array in job.arrays)
        return Part(names, job.operation, job.op, job.root, shapes, job.lengths, held)


class SimulatedVotedJob:
    """A voted job (one that runs only if all ranks are ready), which a frozen plan repeats."""

    def __init__(self, transfer: SimulatedTransfer, job: Job) -> None:
        self.transfer = transfer
        self.job = replace(job, arrays=())

    def begin(self, arrays: tuple[Any, ...]) -> SimulatedPending:
        """Begins one run of the job."""
        return self.transfer.begin_voted(self.transfer.part(replace(self.job, arrays=arrays)))

    def begin_void(self) -> SimulatedPending:
        """Begins one run without data, since this rank is not ready."""
        return self.transfer.begin_voted(None)
