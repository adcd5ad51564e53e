"""Sharing of schedules and lowered plans between ranks of one process.

Otherwise, tests with many ranks would spend most of their time on lowering the same schedule for
each rank.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from unisono import algorithms
from unisono.algorithms.host_layout import Hosts
from unisono.execution import native_executor
from unisono.schedule import RankPlan, Schedule, lower, lower_rank
from unisono.types import Op

T = TypeVar("T")
_MOST = 24


class Once:
    """A cache that makes each object on first use. Concurrent callers wait for the object. Only the
    latest objects are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Any, tuple[threading.Lock, list[Any]]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        with self._lock:
            own, found = self._found.setdefault(key, (threading.Lock(), []))
            self._found.move_to_end(key)
            while len(self._found) > _MOST:
                self._found.popitem(last=False)
        with own:
            if not found:
                found.append(make())  # an error is not cached: each caller gets a new error
            result: T = found[0]
            return result


def _rank_plans(
    schedule: Schedule, shares_memory: bool, may_write_back: bool, hosts: Hosts | None
) -> list[RankPlan]:
    """Returns the results of `lower_rank` for all ranks. `test_lower.py` tests this function."""
    how: Any = {"shares_memory": shares_memory, "may_write_back": may_write_back, "hosts": hosts}
    plans = lower(schedule, **how)
    first = lower_rank(schedule, 0, **how)
    return [
        RankPlan(
            plan=plan,
            slots=tuple(each.num_slots for each in plans),
            uniform=any(each.uniform for each in plans),
            in_place=all(each.in_place for each in plans),
            in_rank_order=first.in_rank_order,
            shares_input=first.shares_input,
            shares_output=first.shares_output,
            writes_back=first.writes_back,
        )
        for plan in plans
    ]


@contextmanager
def shared() -> Iterator[None]:
    """Makes all executors of this process share each built schedule and its lowered plans."""
    schedules, lowered = Once(), Once()

    def build(op: Op, name: str, **how: Any) -> Schedule:
        key = (op, name, tuple(sorted(how.items())))
        return schedules.get(key, lambda: algorithms.build(op, name, **how))

    def lower_shared(
        schedule: Schedule,
        rank: int,
        *,
        shares_memory: bool = False,
        may_write_back: bool = False,
        hosts: Hosts | None = None,
    ) -> RankPlan:
        # keeps the schedule alive, so that no other object gets its id
        how = shares_memory, may_write_back, hosts
        key = (id(schedule), *how)
        _, plans = lowered.get(key, lambda: (schedule, _rank_plans(schedule, *how)))
        found: RankPlan = plans[rank]
        return found

    with pytest.MonkeyPatch.context() as patch:
        names = SimpleNamespace(build=build, block_bytes=algorithms.block_bytes)
        patch.setattr(native_executor, "algorithms", names)
        patch.setattr(native_executor, "lower_rank", lower_shared)
        yield
