"""The parts of a dimension whose length the number of ranks does not divide."""

from __future__ import annotations


def part_of(length: int, part: int, parts: int) -> tuple[int, int]:
    """Returns the first element and the length of a part; the last parts may be short or empty.

    Parts have ceil(length / parts) elements, as in torch.

    >>> [part_of(5, part, 4) for part in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    longest = -(-length // parts)
    first = min(part * longest, length)
    return first, min(longest, length - first)
