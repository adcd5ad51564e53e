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
    if not hasattr(rank, "__index__"):
        raise TypeError(f"{name}: expected the number of a rank, not {rank!r}")
    if not 0 <= rank < ranks:
        raise ValueError(f"{name} {rank} is not one of the {ranks} ranks of this group")


def whole(number: int, name: str) -> int:
    """The number. Raises `TypeError` for what is no whole number, such as 1.0.

    >>> whole(True, "size")
    1
    """
    if not hasattr(number, "__index__"):
        raise TypeError(f"{name}: expected a whole number, not {number!r}")
    return operator.index(number)


def check_tag(tag: int) -> int:
    """The tag. Raises `ValueError` for one out of range, `TypeError` for what is no whole number.

    >>> check_tag(7)
    7
    """
    tag = whole(tag, "tag")
    if not 0 <= tag < TAGS:
        raise ValueError(f"a tag is a number from 0 to 2**63 - 1, not {tag}")
    return tag
