"""Sets of times, as sorted lists of intervals that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.timeline.rank_spans import Interval

Times = Sequence[Interval]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the set of times that are in at least one of the intervals.

    >>> union([Interval(4, 6), Interval(0, 2), Interval(1, 3)])
    [Interval(begun_ns=0, ended_ns=3), Interval(begun_ns=4, ended_ns=6)]
    """
    found: list[Interval] = []
    for each in sorted(intervals):
        if each.ended_ns <= each.begun_ns:
            continue
        if found and each.begun_ns <= found[-1].ended_ns:
            found[-1] = Interval(found[-1].begun_ns, max(found[-1].ended_ns, each.ended_ns))
        else:
            found.append(each)
    return found


def intersection(a: Times, b: Times) -> list[Interval]:
    """Returns the set of times that are in both sets.

    >>> intersection([Interval(0, 5)], [Interval(1, 2), Interval(4, 9)])
    [Interval(begun_ns=1, ended_ns=2), Interval(begun_ns=4, ended_ns=5)]
    """
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begun = max(a[i].begun_ns, b[j].begun_ns)
        ended = min(a[i].ended_ns, b[j].ended_ns)
        if begun < ended:
            found.append(Interval(begun, ended))
        if a[i].ended_ns < b[j].ended_ns:
            i += 1
        else:
            j += 1
    return found


def difference(a: Times, b: Times) -> list[Interval]:
    """Returns the set of times that are in `a` but not in `b`.

    >>> difference([Interval(0, 5)], [Interval(1, 2)])
    [Interval(begun_ns=0, ended_ns=1), Interval(begun_ns=2, ended_ns=5)]
    """
    found: list[Interval] = []
    for whole in a:
        begun = whole.begun_ns
        for hole in intersection([whole], b):
            if begun < hole.begun_ns:
                found.append(Interval(begun, hole.begun_ns))
            begun = hole.ended_ns
        if begun < whole.ended_ns:
            found.append(Interval(begun, whole.ended_ns))
    return found


def seconds(times: Times) -> float:
    """Returns the total length of a set's intervals, in seconds.

    >>> seconds([Interval(0, 500_000_000), Interval(10**9, 2 * 10**9)])
    1.5
    """
    return sum(each.ended_ns - each.begun_ns for each in times) / 1e9
