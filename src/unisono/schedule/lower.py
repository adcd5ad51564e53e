"""Lower a schedule to one plan per rank.

A plan names slots and posts of other ranks, so all ranks are laid out (`staging.py`,
`buffer_allocation.py`), but records are only made for the plans that are asked for. For each step a
rank waits for the posts that show what it reads, unless it has seen them, writes, and posts where
the step says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from unisono.errors import UnsupportedError
from unisono.schedule.buffer_allocation import allocate_buffers
from unisono.schedule.chunk_moves import heads, name
from unisono.schedule.code_generation import emit
from unisono.schedule.dataflow import trace
from unisono.schedule.execution_plan import ExecutionPlan, Reader
from unisono.schedule.record import Records
from unisono.schedule.schedule import Schedule
from unisono.schedule.staging import stage

_MOST = 1 << 16
"""Slots, private places and operands are named by 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The plan of one rank, with what it has to know of the others.

    `slots` are the staging slots of each rank; `uniform` and `in_place` hold for the group: some
    rank needs pieces of one length, and no rank minds when input and output are the same memory.
    `in_rank_order` is that of `Dataflow`.
    """

    plan: ExecutionPlan
    slots: tuple[int, ...]
    uniform: bool
    in_place: bool
    in_rank_order: bool


def lower(schedule: Schedule, *, shares_memory: bool = False) -> tuple[ExecutionPlan, ...]:
    """One plan per rank. With `shares_memory`, ranks read what others were given, and results,
    where those have them (`buffer_allocation.py`), instead of through staging slots.

    Raises `ScheduleError` when the schedule is wrong, `UnsupportedError` where a rank would need
    more slots than records can name.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> [[r.code.name for r in plan.records] for plan in lower(b.build())]
    [['COPY', 'POST', 'COPY', 'POST'], ['WAIT', 'COPY', 'POST']]
    """
    return _Lowering(schedule, shares_memory).plans(0, schedule.collective.ranks)


def lower_rank(schedule: Schedule, rank: int, *, shares_memory: bool = False) -> RankPlan:
    """The plan of one rank: that of `lower` with equal arguments, in a fraction of the time.

    Raises as `lower` does.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> mine = lower_rank(b.build(), 1)
    >>> [r.code.name for r in mine.plan.records], mine.slots
    (['WAIT', 'COPY', 'POST'], (1, 0))
    """
    lowering = _Lowering(schedule, shares_memory)
    (plan,) = lowering.plans(rank, rank + 1)
    return RankPlan(
        plan=plan,
        slots=tuple(lowering.staging.num_slots.tolist()),
        uniform=bool(lowering.allocation.uniform.any()),
        in_place=bool(lowering.allocation.in_place.all()),
        in_rank_order=lowering.flow.in_rank_order,
    )


class _Lowering:
    """The layout of all ranks, and records for some of them."""

    def __init__(self, schedule: Schedule, shares_memory: bool) -> None:
        self.collective = schedule.collective
        self.flow = trace(schedule)
        self.staging = stage(self.flow)
        self.allocation = allocate_buffers(self.flow, self.staging, shares_memory=shares_memory)
        self.stages = 1 + int(self.staging.posts.max())
        most = int(max(self.staging.num_slots.max(), self.allocation.num_tmp.max()))
        if most > _MOST or (np.diff(self.flow.first) >= _MOST).any():
            raise UnsupportedError(
                f"{name(schedule)} on {self.collective.ranks} ranks: a rank would need {most} "
                f"slots, or a reduction as many operands; at most {_MOST} can be named"
            )

    def plans(self, start: int, stop: int) -> tuple[ExecutionPlan, ...]:
        """The plans of the ranks from `start` up to `stop`."""
        table, edges = emit(
            self.flow, self.staging, self.allocation, range(start, stop), self.stages
        )
        readers = self._readers(start, stop)
        addresses_only = bool(self.allocation.shared[self.staging.slot >= 0].all())
        return tuple(
            ExecutionPlan(
                rank=rank,
                ranks=self.collective.ranks,
                records=Records(table[edges[i] : edges[i + 1]]),
                num_slots=int(self.staging.num_slots[rank]),
                num_tmp=int(self.allocation.num_tmp[rank]),
                parts=self.collective.parts,
                stages=self.stages,
                reduce_depth=self.flow.reduce_depth,
                rounds=max(len(self.flow.moves.rounds), 1),
                uniform=bool(self.allocation.uniform[rank]),
                in_place=bool(self.allocation.in_place[rank]),
                readers=readers[i],
                addresses_only=addresses_only,
            )
            for i, rank in enumerate(range(start, stop))
        )

    def _readers(self, start: int, stop: int) -> list[tuple[Reader, ...]]:
        """For each of these ranks the readers of its slots."""
        flow, staging = self.flow, self.staging
        far = np.flatnonzero(staging.far)
        owner = flow.rank[flow.operands[far]]
        far = far[(owner >= start) & (owner < stop)]
        value = flow.operands[far]
        slots, ranks = int(staging.num_slots.max()), self.collective.ranks
        key = (flow.rank[value] * slots + staging.slot[value]) * ranks
        key += flow.rank[staging.target[far]]
        order = key.argsort(kind="stable")
        found = order[heads(key[order])]
        value, reader = value[found], flow.rank[staging.target[far[found]]]
        columns = staging.post[value].tolist(), staging.slot[value].tolist(), reader.tolist()
        readers = tuple(map(Reader, *columns))
        edges = np.searchsorted(flow.rank[value], np.arange(start, stop + 1)).tolist()
        return [readers[a:b] for a, b in pairwise(edges)]
