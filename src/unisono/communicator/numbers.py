"""Numbers that callers give, such as ranks and tags: what is wrong with one is said in words."""

from __future__ import annotations

import operator

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


def check_tag(tag: int) -> int:
    """The tag. Raises `ValueError` for one out of range, `TypeError` for what is no whole number.

    >>> check_tag(7)
    7
    """
    tag = whole(tag, "tag")
    if not 0 <= tag < TAGS:
        raise ValueError(f"a tag is a number from 0 to 2**63 - 1, not {tag}")
    return tag
