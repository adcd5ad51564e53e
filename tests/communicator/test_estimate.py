"""Tests the estimate of a call's time, from which the number of calls in a measurement follows. An
interruption of a trial must not change the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from unisono.communicator.estimate import estimate_call_s

CALL_S = 5e-6


def machine(holds_up_s: Iterator[float], asked: list[int]) -> Callable[[int], float]:
    """Returns a simulated measurement of calls of `CALL_S` seconds. The next value of `holds_up_s`
    is the time in seconds by which an interruption delays a measurement.
    """

    def time_s(calls: int) -> float:
        asked.append(calls)
        return CALL_S + next(holds_up_s, 0.0) / calls

    return time_s


@pytest.mark.parametrize("held_up", range(8))
def test_an_interrupted_trial_does_not_count(held_up: int) -> None:
    holds = (0.004 if batch == held_up else 0.0 for batch in range(100))
    found = estimate_call_s(machine(holds, []), least_s=1e-3, most=100_000)
    assert found == pytest.approx(CALL_S)


def test_trials_grow_until_they_take_long_enough() -> None:
    asked: list[int] = []
    estimate_call_s(machine(iter(()), asked), least_s=1e-3, most=100_000)
    assert asked == [1] * 3 + [8] * 3 + [64] * 3 + [512] * 3


def test_trials_have_at_most_the_allowed_calls() -> None:
    asked: list[int] = []
    estimate_call_s(machine(iter(()), asked), least_s=1.0, most=100)
    assert max(asked) == 100


def test_a_long_call_is_timed_once() -> None:
    asked: list[int] = []

    def time_s(calls: int) -> float:
        asked.append(calls)
        return 0.4

    assert estimate_call_s(time_s, least_s=1e-3, most=100) == 0.4
    assert asked == [1]
