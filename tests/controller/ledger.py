"""A pretended transfer for each rank of a world, with one ledger of the jobs that all begin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.controller.transfers.transfer import Job


@dataclass(frozen=True)
class Submission:
    """One submission of one rank: the `nth` of this name."""

    name: str
    nth: int


@dataclass(frozen=True)
class Part:
    """One rank's part of a job. `held`: its own submissions; none from a rank that joined."""

    names: tuple[str, ...]
    operation: str
    op: str
    root: int
    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] = ()
    held: tuple[Submission, ...] = ()

    def kind(self) -> tuple[object, ...]:
        """Returns what must be equal on all ranks."""
        if self.operation == "all_gather" and len(set(self.lengths)) > 1:
            shapes = tuple(shape[1:] for shape in self.shapes)
        else:
            shapes = self.shapes
        return self.names, self.operation, self.op, self.root, shapes, self.lengths


@dataclass
class Entry:
    """One job of all ranks. None: the rank's job is void."""

    size: int
    parts: dict[int, Part | None] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """True if all ranks have begun the job."""
        return len(self.parts) == self.size

    @property
    def ran(self) -> bool:
        """True if all ranks gave a job."""
        return all(part is not None for part in self.parts.values())


@dataclass
class Ledger:
    """The jobs of all ranks, those that were decided and those that were voted on."""

    size: int
    paired: bool = True
    """The `nth` submission of a name runs with the `nth` of the other ranks: if no rank joins."""
    decided: list[Entry] = field(default_factory=list)
    voted: list[Entry] = field(default_factory=list)
    runs: Counter[tuple[int, Submission]] = field(default_factory=Counter)
    """Number of times that each submission of each rank has run."""
    finished: list[Part] = field(default_factory=list)
    """Rank 0's parts of the jobs that ran, in the order of their ends."""

    def begin(self, jobs: list[Entry], rank: int, part: Part | None) -> Entry:
        """Notes that `rank` begins its next job in the list `jobs`."""
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
    """A job that one rank has begun. `end_ns`: when a pretended link has carried it."""

    def __init__(self, entry: Entry, end_ns: int = 0) -> None:
        self.entry = entry
        self.end_ns = end_ns

    def wait(self, timeout_s: float | None = None) -> None:
        """Ends at once: nothing in a simulated world waits."""
        assert self.entry.completed, "waits for a job that other ranks have not begun"

    def is_completed(self) -> bool:
        """True if all ranks have begun the job."""
        return self.entry.completed

    @property
    def ran(self) -> bool:
        """True if all ranks gave a job."""
        return self.entry.ran

    def times_ns(self) -> tuple[int, int]:
        """Returns the times of the pretended link."""
        return self.end_ns, self.end_ns


class SimulatedTransfer:
    """The transfer of one rank. It knows arrays by their identity."""

    def __init__(self, rank: int, ledger: Ledger, now_ns: Callable[[], int] = lambda: 0) -> None:
        self.now_ns = now_ns
        self.free_ns = 0
        """Time at which the simulated link is free."""
        self.rank = rank
        self.ledger = ledger
        self.submissions: dict[int, tuple[Submission, Any]] = {}

    def know(self, array: Any, submission: Submission) -> None:
        """Notes which submission an array is of, and keeps it alive."""
        self.submissions[id(array)] = submission, array

    def begin(self, job: Job) -> SimulatedPending:
        """Begins a decided job."""
        return SimulatedPending(self.ledger.begin(self.ledger.decided, self.rank, self.part(job)))

    def begin_absent(self, names: Sequence[str], job: Job) -> SimulatedPending:
        """Begins a decided job to which this rank has nothing to give."""
        part = self._part(job, tuple(names), ())
        return SimulatedPending(self.ledger.begin(self.ledger.decided, self.rank, part))

    def prepare(self, job: Job) -> SimulatedVotedJob:
        """Prepares a voted job."""
        return SimulatedVotedJob(self, job)

    def begin_void(self) -> SimulatedPending:
        """Begins the next voted job as a rank that is not ready."""
        return self.begin_voted(None)

    def begin_voted(self, part: Part | None) -> SimulatedPending:
        """Begins a voted job; None: this rank is not ready."""
        entry = self.ledger.begin(self.ledger.voted, self.rank, part)
        if part is not None:
            elements = sum(math.prod(shape) for shape in part.shapes)
            self.free_ns = max(self.free_ns, self.now_ns()) + 20 + 10 * elements
        return SimulatedPending(entry, self.free_ns)

    def close(self) -> None:
        """Has nothing to end."""

    def part(self, job: Job) -> Part:
        """Returns the job with names in the place of arrays."""
        held = tuple(self.submissions[id(array)][0] for array in job.arrays)
        return self._part(job, tuple(each.name for each in held), held)

    @staticmethod
    def _part(job: Job, names: tuple[str, ...], held: tuple[Submission, ...]) -> Part:
        shapes = tuple(tuple(array.shape) for array in job.arrays)
        return Part(names, job.operation, job.op, job.root, shapes, job.lengths, held)


class SimulatedVotedJob:
    """A voted job that a plan repeats."""

    def __init__(self, transfer: SimulatedTransfer, job: Job) -> None:
        self.transfer = transfer
        self.job = replace(job, arrays=())

    def begin(self, arrays: tuple[Any, ...]) -> SimulatedPending:
        """Begins a run."""
        return self.transfer.begin_voted(self.transfer.part(replace(self.job, arrays=arrays)))
