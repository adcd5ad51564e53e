"""Rough duration of a call, to choose the number of calls per measurement."""

from __future__ import annotations

from collections.abc import Callable

_TRIALS = 3
_LONG_S = 0.02
"""Seconds of a trial that short interruptions do not distort, so that one trial is enough."""


def estimate_call_s(time_s: Callable[[int], float], *, least_s: float, most: int) -> float:
    """Returns the seconds per call of back-to-back calls. Increases their number until they take
    `least_s` in total, up to `most` calls.

    `time_s(n)` runs n calls and returns seconds per call. The result is the best of a few trials.
    If a trial with an interruption of milliseconds counted, the next measurement would have too few
    calls, and would time mostly their start.

    >>> estimate_call_s(lambda calls: 2e-6, least_s=1e-3, most=10_000)
    2e-06
    """
    calls = 1
    while True:
        call_s = _best_s(time_s, calls)
        if call_s * calls >= least_s or calls >= most:
            return call_s
        calls = min(8 * calls, most)


def _best_s(time_s: Callable[[int], float], calls: int) -> float:
    best_s = time_s(calls)
    for _ in range(_TRIALS - 1):
        if best_s * calls >= _LONG_S:
            break
        best_s = min(best_s, time_s(calls))
    return best_s
