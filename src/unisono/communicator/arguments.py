"""Checks of numeric arguments, such as ranks and tags. Errors name the argument and the value."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

TAGS = 1 << 63
"""Number of tags for callers. The library itself uses tags from this number on."""


def check_rank(rank: int, ranks: int, name: str) -> None:
    """Raises `ValueError` unless `rank` is below `ranks`, and `TypeError` unless it is an
    integer.

    >>> check_rank(3, 4, "root")
    >>> check_rank("3", 4, "root")
    Traceback (most recent call last):
    TypeError: root: expected the number of a rank, not '3'
    """
    if not 0 <= as_integer(rank, name, "the number of a rank") < ranks:
        raise ValueError(f"{name} {rank} is not one of the {ranks} ranks of this group")


def as_integer(number: int, name: str, expected: str = "a whole number") -> int:
    """Returns the number as an int. Raises `TypeError` for a value such as 1.0.

    >>> as_integer(True, "size")
    1
    """
    try:
        return operator.index(number)
    except TypeError:  # arrays of several numbers raise it, too
        raise TypeError(f"{name}: expected {expected}, not {number!r:.60}") from None


def as_int64(number: int, name: str) -> int:
    """Returns the number as an int. Raises `TypeError` like `as_integer`, and `ValueError` for more
    than 64 bits.
    """
    number = as_integer(number, name)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name}: expected a number of 64 bits, not {number}")
    return number


def check_timeout(timeout_s: Any) -> float:
    """Returns the timeout in seconds. Raises `TypeError` unless it is a number, and `ValueError`
    unless it is positive.

    >>> check_timeout("5")
    Traceback (most recent call last):
    TypeError: timeout_s: expected seconds, not '5'
    """
    if not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s: expected seconds, not {timeout_s!r:.60}")
    limit_s = float(timeout_s)
    if not limit_s > 0:
        raise ValueError(f"timeout_s: expected more than 0 seconds, not {timeout_s}")
    return limit_s


def check_tag(tag: int) -> int:
    """Returns the tag. Raises `TypeError` unless it is an integer, and `ValueError` if it is out of
    range.

    >>> check_tag(7)
    7
    """
    tag = as_integer(tag, "tag")
    if not 0 <= tag < TAGS:
        raise ValueError(f"tag: expected a number from 0 to 2**63 - 1, not {tag}")
    return tag
