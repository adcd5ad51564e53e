"""The reason why a candidate of a search is worse than the previous candidate."""

from __future__ import annotations

from collections.abc import Mapping


def reason_of_loss(
    objective: str,
    value: float,
    kinds: Mapping[str, float],
    next_value: float,
    next_kinds: Mapping[str, float],
) -> str:
    """Returns a text that says how the next candidate differs: first in the search's objective,
    then in the step time, by kind.

    `value` and `next_value` are the values of the objective. `kinds` has the seconds by kind.

    >>> reason_of_loss("devices", 8, {"matmul": 2.0}, 16, {"matmul": 1.0})
    '+8 devices; -1 s: matmul -1 s'
    """
    time = time_difference(kinds, next_kinds)
    more = next_value - value
    if objective == "cost":
        return f"{more / value:+.2%} device time; {time}"
    if objective == "devices" and more:
        return f"{more:+.0f} devices; {time}"
    if objective == "memory":
        return f"{more / 1e9:+.3g} GB; {time}"
    return time


def time_difference(kinds: Mapping[str, float], next_kinds: Mapping[str, float]) -> str:
    """Returns a text with the difference of the next candidate's step time, and the kinds of time
    that contribute most to it, largest first.

    >>> time_difference({"bubble": 0.1, "matmul": 0.9}, {"bubble": 0.8, "matmul": 0.7})
    '+0.5 s: bubble +0.7 s, matmul -0.2 s'
    """
    changes = {kind: next_kinds[kind] - seconds for kind, seconds in kinds.items()}
    largest = sorted(changes, key=lambda kind: -abs(changes[kind]))[:3]
    threshold = 0.02 * max(abs(changes[largest[0]]), 1e-12)
    parts = [f"{kind} {changes[kind]:+.3g} s" for kind in largest if abs(changes[kind]) > threshold]
    return f"{sum(changes.values()):+.3g} s" + (f": {', '.join(parts)}" if parts else "")
