"""The proof that a schedule is right."""

from __future__ import annotations

import numpy as np

from unisono.schedule.lower import lower
from unisono.schedule.proof import prove
from unisono.schedule.replay import check_plans
from unisono.schedule.schedule import Schedule

REPLAYED_CHUNKS = 4096
"""Up to so many moved chunks (a ring of 45 ranks) `check` replays the plans too."""


def check(schedule: Schedule) -> None:
    """Prove that a schedule performs its collective, and that its plans can run.

    The schedule is replayed symbolically: all indices exist; nothing is read before it holds
    something; no contribution is reduced twice; no two writes of a round meet unless all reduce;
    in the end every rank holds exactly what the collective demands. Channels change none of this:
    a schedule is right for any assignment of its transfers to lanes.

    That the plans made by `lower` run without getting stuck and without races, with slots for any
    number d >= 1 of blocks, follows from how they are made. Order all posts by (block, round,
    half), where a rank first posts what it sends of its inputs and then what it has received.
    (1) A value that is read in a round was in the input, and is posted in the first half of some
    round up to this one, or was written in an earlier round, and is posted in its second half; the
    reader waits for it in the second half. So each wait is for a post that comes before it in the
    order. (2) A rank enters a block when all others have posted the end of the block d before.
    By induction over the order every post is made: no rank gets stuck. (3) A slot is written once
    a block, before the post that covers it, and read between the wait for that post and the end of
    the block; the next writing is d blocks later, after all have posted that end: no race.
    Where ranks share memory instead, the same order of posts says when it may be read; that it is
    not written before all have read it is `single_copy_hazards.returned_in_time`, and at the end
    of the call each rank waits for its readers' last post.
    The premises of (1) are what was proved of the schedule. That `lower` keeps to the rest is not
    taken on trust where it can be tried: plans of up to `REPLAYED_CHUNKS` moved chunks, in both
    forms, are replayed through slots for a single block, three blocks long (`check_plans`); above,
    it is.

    Raises `ScheduleError`, naming rank, chunk and round.

    >>> from unisono.schedule import Collective, Schedule, check
    >>> from unisono.types import Op
    >>> collective = Collective(op=Op.BROADCAST, ranks=2, root=0)
    >>> check(Schedule(collective=collective, algorithm="none", transfers=()))
    Traceback (most recent call last):
    ...
    unisono.errors.ScheduleError: broadcast by none: rank 1, chunk 0, round 0 holds nothing \
in the end
    """
    if schedule.columns.count.sum(dtype=np.int64) > REPLAYED_CHUNKS:
        prove(schedule)
    else:
        check_plans(schedule.collective, lower(schedule), depth=1, blocks=3)
        plans = lower(schedule, shares_memory=True)
        in_place = all(plan.in_place for plan in plans)
        check_plans(schedule.collective, plans, depth=1, blocks=3, in_place=in_place)
