"""About how long a call takes: what decides how many of them make a turn."""

from __future__ import annotations

from collections.abc import Callable

_TRIALS = 3
_LONG_S = 0.02
"""What the machine does to a trial by the way is shorter."""


def estimate_call_s(time_s: Callable[[int], float], *, least_s: float, most: int) -> float:
    """Seconds of a call, from calls back to back that take `least_s` in all, or `most` calls.

    `time_s(n)` times n calls, in seconds a call. Of a few trials the best counts: one call that the
    machine held up for milliseconds would leave a turn of a handful of calls, and measure how they
    begin.

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
