"""Conversion of a schedule to one execution plan for each rank.

A plan refers to slots and posts of other ranks. So the conversion assigns slots, posts and memory
for all ranks (`staging.py`, `buffer_allocation.py`), but generates records only for the requested
plans. In each step, a rank first waits for the posts that publish its operands, unless it already
waited for them. Then the rank writes, and posts if the step ends with a post.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from unisono.errors import UnsupportedError
from unisono.schedule.buffer_allocation import allocate
from unisono.schedule.chunk_moves import name, run_starts
from unisono.schedule.code_generation import emit
from unisono.schedule.dataflow import trace
from unisono.schedule.execution_plan import ExecutionPlan, Reader
from unisono.schedule.record import Records, Space
from unisono.schedule.schedule import Schedule
from unisono.schedule.staging import stage
from unisono.schedule.write_back import write_back, writes_back

_MOST = 1 << 16
"""Largest number of slots, private places or operands, because records store these numbers in 16
bits.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Execution plan of one rank, with the properties of the other ranks' plans that the rank
    needs.

    - `slots`: the number of staging slots of each rank.
    - `uniform`: true if some rank needs pieces of the same length.
    - `in_place`: true if the input and output of every rank may be the same memory.
    - `in_rank_order`: true if every result is reduced in rank order (see `Dataflow`).
    - `shares_input`, `shares_output`: true if ranks read other ranks' input or output in place.
    - `writes_back`: true if ranks write results to other ranks' memory (see `write_back.py`).
    """

    plan: ExecutionPlan
    slots: tuple[int, ...]
    uniform: bool
    in_place: bool
    in_rank_order: bool
    shares_input: bool
    shares_output: bool
    writes_back: bool


def lower(
    schedule: Schedule,
    *,
    shares_memory: bool = False,
    may_write_back: bool = False,
    hosts: Sequence[Sequence[int]] | None = None,
) -> tuple[ExecutionPlan, ...]:
    """Returns one plan for each rank.

    With `shares_memory`, ranks read inputs and results of other ranks in place
    (`buffer_allocation.py`), instead of through staging slots. With `may_write_back` as well, ranks
    also write results in place if the schedule permits it (`write_back.py`). Such plans are for
    in-place calls only. `hosts` are the ranks of each host (None: a single host); only ranks of one
    host read each other's memory in place.

    Raises `ScheduleError` for a wrong schedule, and `UnsupportedError` if a rank needs more slots
    than records can name.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> [[r.code.name for r in plan.records] for plan in lower(b.build())]
    [['COPY', 'POST', 'COPY', 'POST'], ['WAIT', 'COPY', 'POST']]
    """
    lowering = _Lowering(schedule, shares_memory, may_write_back, hosts)
    return lowering.plans(0, schedule.collective.ranks)


def lower_rank(
    schedule: Schedule,
    rank: int,
    *,
    shares_memory: bool = False,
    may_write_back: bool = False,
    hosts: Sequence[Sequence[int]] | None = None,
) -> RankPlan:
    """Returns the plan that `lower` returns for this rank. This function is faster than `lower`,
    because it generates the records of one rank only.

    Raises the same errors as `lower`.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> mine = lower_rank(b.build(), 1)
    >>> [r.code.name for r in mine.plan.records], mine.slots
    (['WAIT', 'COPY', 'POST'], (1, 0))
    """
    lowering = _Lowering(schedule, shares_memory, may_write_back, hosts)
    (plan,) = lowering.plans(rank, rank + 1)
    return RankPlan(
        plan=plan,
        slots=tuple(lowering.staging.num_slots.tolist()),
        uniform=bool(lowering.allocation.uniform.any()),
        in_place=bool(lowering.allocation.in_place.all()),
        in_rank_order=lowering.flow.in_rank_order,
        shares_input=lowering.allocation.shares(Space.IN),
        shares_output=lowering.allocation.shares(Space.OUT),
        writes_back=lowering.writes_back,
    )


class _Lowering:
    """Slots, posts and memory of all ranks, from which `plans` generates the records of some
    ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        shares_memory: bool,
        may_write_back: bool,
        hosts: Sequence[Sequence[int]] | None,
    ) -> None:
        self.collective = schedule.collective
        self.flow = trace(schedule)
        self.staging = stage(self.flow)
        self.allocation = allocate(
            self.flow, self.staging, shares_memory=shares_memory, hosts=hosts
        )
        self.addresses_only = bool(self.allocation.shared[self.staging.slot >= 0].all())
        self.writes_back = (
            shares_memory
            and may_write_back
            and self.addresses_only
            and writes_back(self.flow, self.staging)
        )
        self.stages = 1 + int(self.staging.posts.max())
        most = int(max(self.staging.num_slots.max(), self.allocation.num_tmp.max()))
        if most > _MOST or (np.diff(self.flow.first) >= _MOST).any():
            raise UnsupportedError(
                f"{name(schedule)} on {self.collective.ranks} ranks: a rank needs {most} "
                f"slots, or a reduction needs too many operands; the limit is {_MOST}"
            )

    def plans(self, start: int, stop: int) -> tuple[ExecutionPlan, ...]:
        """Returns the plans of ranks `start` to `stop` - 1."""
        table, edges = emit(
            self.flow, self.staging, self.allocation, range(start, stop), self.stages
        )
        readers = self._readers(start, stop)
        return tuple(
            ExecutionPlan(
                rank=rank,
                ranks=self.collective.ranks,
                records=Records(
                    write_back(table[edges[i] : edges[i + 1]])
                    if self.writes_back
                    else table[edges[i] : edges[i + 1]]
                ),
                num_slots=int(self.staging.num_slots[rank]),
                num_tmp=int(self.allocation.num_tmp[rank]),
                parts=self.collective.parts,
                stages=self.stages,
                reduce_depth=self.flow.reduce_depth,
                rounds=max(len(self.flow.moves.rounds), 1),
                uniform=bool(self.allocation.uniform[rank]),
                in_place=bool(self.allocation.in_place[rank]),
                readers=readers[i],
                addresses_only=self.addresses_only,
            )
            for i, rank in enumerate(range(start, stop))
        )

    def _readers(self, start: int, stop: int) -> list[tuple[Reader, ...]]:
        """Returns the readers of the slots of each rank from `start` to `stop` - 1."""
        flow, staging = self.flow, self.staging
        remote = np.flatnonzero(staging.remote)
        if self.writes_back:  # then nobody reads results
            remote = remote[flow.operands[remote] < flow.inputs]
        owner = flow.rank[flow.operands[remote]]
        remote = remote[(owner >= start) & (owner < stop)]
        value = flow.operands[remote]
        slots, ranks = int(staging.num_slots.max()), self.collective.ranks
        key = (flow.rank[value] * slots + staging.slot[value]) * ranks
        key += flow.rank[staging.target[remote]]
        order = key.argsort(kind="stable")
        found = order[run_starts(key[order])]
        value, reader = value[found], flow.rank[staging.target[remote[found]]]
        columns = staging.post[value].tolist(), staging.slot[value].tolist(), reader.tolist()
        readers = tuple(map(Reader, *columns))
        edges = np.searchsorted(flow.rank[value], np.arange(start, stop + 1)).tolist()
        return [readers[a:b] for a, b in pairwise(edges)]
