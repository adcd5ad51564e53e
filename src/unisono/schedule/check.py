"""The proof that a schedule is right."""

from __future__ import annotations

from unisono.schedule.lower import lower
from unisono.schedule.replay import check_plans
from unisono.schedule.transfer import Schedule


def check(schedule: Schedule) -> None:
    """Prove that a schedule performs its collective, and that its plans can run.

    The schedule is replayed symbolically: all indices exist; nothing is read before it holds
    something; no contribution is reduced twice; no two writes of a round meet unless all reduce;
    in the end every rank holds exactly what the collective demands. Then its plans are replayed
    through slots for a single block, three blocks long: no rank gets stuck, and every slot is
    read after it is written and before it is overwritten, in whatever order the ranks run.

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
    check_plans(schedule.collective, lower(schedule), depth=1, blocks=3)
