"""Results of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.topology import Floats, Ints, Topology

Column = NDArray[np.int32]


class TaskKind(IntEnum):
    """Kind of a step."""

    MESSAGE = 0
    REDUCTION = 1
    JOIN = 2
    """A step that waits for several steps and takes no time. Later steps can then wait for this one
    step."""
    COMPUTE = 3
    TRAFFIC = 4


class StepTime(NamedTuple):
    """A step with its times: a message from `src` to `dst`, or local work of a rank (`src ==
    dst`)."""

    job: int
    kind: TaskKind
    round: int
    src: int
    dst: int
    channel: int
    bytes: float
    begun_s: float
    arrived_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """All steps, one row each. `begun_s` is the time at which the first byte left, `arrived_s` the
    time at which the last byte arrived. `cause` is the last step that a step waited for, or -1."""

    job: Column
    kind: NDArray[np.uint8]
    round: Column
    src: Column
    dst: Column
    channel: Column
    bytes: Floats
    begun_s: Floats
    arrived_s: Floats
    cause: Column

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, row: int) -> StepTime:
        names = StepTime._fields
        values = {name: getattr(self, name)[row].item() for name in names}
        return StepTime(**{**values, "kind": TaskKind(values["kind"])})

    def messages(self) -> Ints:
        """Returns the row numbers of messages between different ranks."""
        return np.flatnonzero((self.kind == TaskKind.MESSAGE) & (self.src != self.dst))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Start of a job's first step and end of its last step, in seconds."""

    name: str
    begun_s: float
    ended_s: float

    @property
    def time_s(self) -> float:
        """Seconds from the start of the job's first step to the end of its last step."""
        return self.ended_s - self.begun_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Traffic of each link over time. `link_bytes[i, j]` is the number of bytes that link i carried
    in interval j. Each interval has `width_s` seconds."""

    width_s: float
    link_bytes: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """The simulated time of an operation, and its bottlenecks.

    >>> import unisono
    >>> from unisono import algorithms, topology
    >>> ring = algorithms.build("all_reduce", "ring", ranks=4)
    >>> result = unisono.simulate(ring, topology.ring(4), 100e6)
    >>> round(result.time_s, 5), result.utilisation.round(2).tolist()
    (0.003, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    """

    topology: Topology
    time_s: float
    """Time in seconds at which the last job ends."""
    jobs: tuple[JobTimes, ...]
    steps: Steps
    link_bytes: Floats
    """Bytes that each directed link carried."""
    capacity_Bps: Floats
    """Bandwidth of each directed link under the simulated conditions; 0 for a failed link."""
    usage: Usage | None = None

    @cached_property
    def utilisation(self) -> Floats:
        """Ratio of the bytes that each directed link carried to the bytes that it could have
        carried."""
        could = self.capacity_Bps * self.time_s
        return np.divide(self.link_bytes, could, out=np.zeros_like(could), where=could > 0)

    @property
    def busiest_link(self) -> int:
        """The id of the directed link with the highest utilisation; -1 if the network has no
        links."""
        return int(np.argmax(self.utilisation)) if len(self.utilisation) else -1

    def link_name(self, link: int) -> str:
        """Returns a link's name, such as `rank 0 -> rank 1`."""
        ends = (int(self.topology.links.src[link]), int(self.topology.links.dst[link]))
        return " -> ".join(self._node_name(node) for node in ends)

    def _node_name(self, node: int) -> str:
        if node < self.topology.num_ranks:
            return f"rank {node}"
        names = self.topology.nodes.names
        return names[node] if names else f"switch {node - self.topology.num_ranks}"

    def algbw_Bps(self, nbytes: float) -> float:
        """Returns the bytes of the operation divided by its time, as nccl-tests does."""
        return nbytes / self.time_s if self.time_s else 0.0

    def critical_path(self) -> list[StepTime]:
        """Returns the steps that determine the time, in order. Each step waited for the previous
        step."""
        return [self.steps[row] for row in self.critical_rows()]

    def critical_rows(self) -> list[int]:
        """Returns the row numbers of the critical path's steps, without joins."""
        return list(self._critical_backwards())[::-1]

    def _critical_backwards(self) -> Iterator[int]:
        ends = self.steps.kind != TaskKind.TRAFFIC
        if not ends.any():
            return
        row = int(np.argmax(np.where(ends, self.steps.arrived_s, -1.0)))
        while row >= 0:
            if self.steps.kind[row] != TaskKind.JOIN:
                yield row
            row = int(self.steps.cause[row])
