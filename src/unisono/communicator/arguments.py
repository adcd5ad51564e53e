"""Numbers that callers give, such as ranks and tags: what is wrong with one is said in words."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

TAGS = 1 << 63
"""Tags of callers are below; those from here on are the library's."""


def check_rank(rank: int, ranks: int, name: str) -> None:
    """Raises `ValueError` for what is not one of `ranks`, `TypeError` for what is no whole number.

    >>> check_rank(3, 4, "root")
    >>> check_rank("3", 4, "root")
    Traceback (most recent call last):
    TypeError: root: expected the number of a rank, not '3'
    """
    if not 0 <= whole(rank, name, "the number of a rank") < ranks:
        raise ValueError(f"{name} {rank} is not one of the {ranks} ranks of this group")


def whole(number: int, name: str, expected: str = "a whole number") -> int:
    """The number. Raises `TypeError` for what is no whole number, such as 1.0.

    >>> whole(True, "size")
    1
    """
    try:
        return operator.index(number)
    except TypeError:  # also of arrays of several numbers
        raise TypeError(f"{name}: expected {expected}, not {number!r:.60}") from None


def word(number: int, name: str) -> int:
    """The number. Raises `TypeError` as `whole`, `ValueError` for one of more than 64 bits."""
    number = whole(number, name)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name}: expected a number of 64 bits, not {number}")
    return number


def check_timeout(timeout_s: Any) -> float:
    """The seconds. Raises `ValueError` unless they are positive, `TypeError` for no number.

    >>> check_timeout("5")
    Traceback (most recent call last):
    TypeError: timeout_s: expected seconds, not '5'
    """
    if not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s: expected seconds, not {timeout_s!r:.60}")
    limit_s = float(timeout_s)
    if not limit_s > 0:
        raise ValueError(f"a timeout must be positive, not {timeout_s}")
    return limit_s


def check_tag(tag: int) -> int:
    """The tag. Raises `ValueError` for one out of range, `TypeError` for what is no whole number.

    >>> check_tag(7)
    7
    """
    tag = whole(tag, "tag")
    if not 0 <= tag < TAGS:
        raise ValueError(f"a tag is a number from 0 to 2**63 - 1, not {tag}")
    return tag
