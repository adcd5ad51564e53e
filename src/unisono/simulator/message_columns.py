"""The messages and reductions of a schedule, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.native import simulator_messages
from unisono.simulator.conditions import Order
from unisono.simulator.in_network import Trees
from unisono.simulator.job import Job
from unisono.simulator.result import TaskKind
from unisono.topology import Ints

_NO_GROUPS = np.empty(0, np.int32)


def message_columns(
    job: Job, trees: Trees | None, *, reductions: bool, gates: bool, order: Order
) -> Any:
    """Returns a schedule's messages and reductions as columns; see `native.simulator_messages`."""
    schedule, columns = job.schedule, job.schedule.columns
    return simulator_messages(
        columns.round,
        columns.src,
        columns.src_chunk,
        columns.dst,
        columns.dst_chunk,
        columns.count,
        columns.reduce.view(np.uint8),
        columns.channel,
        _NO_GROUPS if trees is None else trees.group,
        ranks=schedule.collective.ranks,
        locations=max(1, schedule.num_locations),
        reductions=reductions,
        gates=gates,
        order=int(order),
    )


def reductions_in_switches(
    trees: Trees, kind: NDArray[np.uint8], needs: NDArray[np.int32], starts: Ints
) -> Ints:
    """Returns the row numbers of the reductions that switches perform, because their messages
    belong to trees."""
    reductions = np.flatnonzero(kind == TaskKind.REDUCTION)
    message = (np.cumsum(kind == TaskKind.MESSAGE) - 1)[needs[starts[reductions]]]
    found: Ints = reductions[trees.joined[message]]
    return found


def placed(rank: NDArray[np.int32], members: Ints) -> NDArray[np.int32]:
    """Maps a schedule's ranks to ranks of the network. Negative numbers become -1."""
    return np.where(rank < 0, -1, members[rank]).astype(np.int32)
