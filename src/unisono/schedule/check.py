"""Proof that a schedule performs its collective, and that its execution plans can run.

The plans of `lower` never deadlock and never race. This holds for every d >= 1, where d is the
number of blocks that the slots can hold at the same time. The proof orders all posts by (block,
round, half). In the first half of a round, a rank posts the inputs that it sends. In the second
half, the rank posts the values that it has received.

1. A value that a round reads is an input or the result of an earlier round. The owner posts an
   input in the first half of this or an earlier round. The owner posts a result in the second
   half of an earlier round. The reader waits in the second half. So each wait is for a post
   that precedes the wait in the order.
2. A rank enters a block after all other ranks have posted the end of the block d blocks before.
   By induction over the order, every post happens. No rank deadlocks.
3. A rank writes a slot once in a block, before the post that publishes the slot. Readers read
   the slot between their wait for that post and the end of the block. The rank writes the slot
   again d blocks later, after all ranks have posted the end of the block. No race exists.

With single copy, the same order of posts determines when a rank may read another rank's memory.
`single_copy_hazards.read_in_time` ensures that the owner writes this memory only after all reads.
At the end of the call, each rank waits for the last post of its readers.

The premises of (1) are the conditions that `check` states. `check` also tests whether `lower` keeps
the other premises. For up to `REPLAYED_CHUNKS` moved chunks, `check_plans` replays the plans with
and without single copy, and with write-back (`write_back.py`), with slots for one block, over three
blocks. Above this limit, `check` trusts `lower`.
"""

from __future__ import annotations

import numpy as np

from unisono.schedule.lower import lower
from unisono.schedule.proof import prove
from unisono.schedule.replay import check_plans
from unisono.schedule.schedule import Schedule

REPLAYED_CHUNKS = 4096
"""Largest number of moved chunks for which `check` also replays the plans. A ring all_reduce of 45
ranks moves 3960 chunks.
"""


def check(schedule: Schedule) -> None:
    """Proves that a schedule performs its collective, and that its execution plans can run.

    `check` replays the schedule symbolically. The schedule must meet these conditions:

    - All indices exist.
    - No transfer reads a location before the location has a value.
    - No contribution is reduced twice.
    - Two transfers of one round write the same location only if all of them reduce.
    - At the end, every rank holds exactly the chunks that the collective demands.

    Channels do not matter. A correct schedule stays correct for any assignment of transfers to
    channels.

    The plans of `lower` never deadlock and never race. The module's docstring has the proof. For up
    to `REPLAYED_CHUNKS` moved chunks, `check` also replays the plans, with and without single copy.
    Above this limit, `check` trusts `lower`.

    Raises `ScheduleError` with the rank, chunk and round.

    >>> from unisono.schedule import Collective, Schedule, check
    >>> from unisono.types import Op
    >>> collective = Collective(op=Op.BROADCAST, ranks=2, root=0)
    >>> check(Schedule(collective=collective, algorithm="none", transfers=()))
    Traceback (most recent call last):
    ...
    unisono.errors.ScheduleError: broadcast by none: rank 1, chunk 0, round 0 is empty at the end
    """
    if schedule.columns.count.sum(dtype=np.int64) > REPLAYED_CHUNKS:
        prove(schedule)
    else:
        check_plans(schedule.collective, lower(schedule), depth=1, blocks=3)
        plans = lower(schedule, shares_memory=True)
        in_place = all(plan.in_place for plan in plans)
        check_plans(schedule.collective, plans, depth=1, blocks=3, in_place=in_place)
        if in_place:
            plans = lower(schedule, shares_memory=True, may_write_back=True)
            check_plans(schedule.collective, plans, depth=1, blocks=3, in_place=True)
