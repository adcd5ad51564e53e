"""What a simulation has found."""

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
    """What a step is."""

    MESSAGE = 0
    REDUCTION = 1
    JOIN = 2
    """Takes no time: what waits for it waits for several others."""
    COMPUTE = 3
    TRAFFIC = 4


class StepTime(NamedTuple):
    """One step: a message from `src` to `dst`, or what a rank does by itself (`src == dst`)."""

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
    """All that happened, a row each. `begun_s` is when the first byte left, `arrived_s` when the
    last was there. `cause` is the step that this one waited for last, -1 for none."""

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
        """The rows that are messages from one rank to another."""
        return np.flatnonzero((self.kind == TaskKind.MESSAGE) & (self.src != self.dst))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """When a job's first step began, and its last ended."""

    name: str
    begun_s: float
    ended_s: float

    @property
    def time_s(self) -> float:
        """From one to the other."""
        return self.ended_s - self.begun_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Bytes that each link has carried in each interval of `width_s` seconds: `[links, bins]`."""

    width_s: float
    link_bytes: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """How long it takes, and what limits it.

    >>> import unisono
    >>> from unisono import algorithms, topology
    >>> ring = algorithms.build("all_reduce", "ring", ranks=4)
    >>> result = unisono.simulate(ring, topology.ring(4), 100e6)
    >>> round(result.time_s, 5), result.utilisation.round(2).tolist()
    (0.003, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    """

    topology: Topology
    time_s: float
    """Until the last job is done."""
    jobs: tuple[JobTimes, ...]
    steps: Steps
    link_bytes: Floats
    """What each directed link has carried."""
    capacity_Bps: Floats
    """Of each directed link, as it was: 0 for one that failed."""
    usage: Usage | None = None

    @cached_property
    def utilisation(self) -> Floats:
        """Of each directed link: the part of what it could have carried."""
        could = self.capacity_Bps * self.time_s
        return np.divide(self.link_bytes, could, out=np.zeros_like(could), where=could > 0)

    @property
    def busiest_link(self) -> int:
        """The directed link with the highest utilisation; the first of equals. -1 without links."""
        return int(np.argmax(self.utilisation)) if len(self.utilisation) else -1

    def link_name(self, link: int) -> str:
        """A link by its ends: `rank 0 -> rank 1`."""
        ends = (int(self.topology.links.src[link]), int(self.topology.links.dst[link]))
        return " -> ".join(self._node_name(node) for node in ends)

    def _node_name(self, node: int) -> str:
        if node < self.topology.num_ranks:
            return f"rank {node}"
        names = self.topology.nodes.names
        return names[node] if names else f"switch {node - self.topology.num_ranks}"

    def algbw_Bps(self, nbytes: float) -> float:
        """Bytes of the operation over its time, as nccl-tests counts."""
        return nbytes / self.time_s if self.time_s else 0.0

    def critical_path(self) -> list[StepTime]:
        """The steps that the time is made of, first to last: each is what the next waited for."""
        return [self.steps[row] for row in self.critical_rows()]

    def critical_rows(self) -> list[int]:
        """The rows of the critical path; joins are left out."""
        return list(self._back())[::-1]

    def _back(self) -> Iterator[int]:
        ends = self.steps.kind != TaskKind.TRAFFIC
        if not ends.any():
            return
        row = int(np.argmax(np.where(ends, self.steps.arrived_s, -1.0)))
        while row >= 0:
            if self.steps.kind[row] != TaskKind.JOIN:
                yield row
            row = int(self.steps.cause[row])
