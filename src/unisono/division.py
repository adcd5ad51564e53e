"""Division of whole numbers: the parts of a length, and divisors."""

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


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of a number that is nearest to the wanted number.

    >>> nearest_divisor(12, 5)
    4
    """
    return min(divisors(number), key=lambda d: abs(d - wanted))
