"""When the votes that are there suffice, so that no others can decide anything else."""

from __future__ import annotations

from collections.abc import Set


def suffices(yes: Set[int], ended: Set[int], voters: Set[int]) -> bool:
    """Whether the ranks `yes` of `voters` may decide; of the others `ended` have ended for certain.

    More than half may, and half with the lowest: of two such sets one has a rank of the other. So
    may all who live, however few. Who is only silent may live on the other side of a cut.

    >>> suffices({0, 1}, set(), {0, 1, 2, 3}), suffices({2, 3}, set(), {0, 1, 2, 3})
    (True, False)
    >>> suffices({3}, {0, 1, 2}, {0, 1, 2, 3})
    True
    """
    if voters - yes <= ended:
        return True
    if 2 * len(yes & voters) == len(voters):
        return min(voters) in yes
    return 2 * len(yes & voters) > len(voters)
