"""The order of ranks in a layout that keeps the axes with the most traffic within a host."""

from __future__ import annotations

from collections.abc import Sequence

Hosts = Sequence[Sequence[int]]
"""The ranks of each host."""


def placed_ranks(blocks: Sequence[int], hosts: Hosts) -> tuple[int, ...]:
    """Returns the rank at each place of a layout.

    A layout with blocks of 2 and of 4 has groups of 2 and of 4 consecutive places, which exchange
    the most data. As many groups as possible have all their ranks on one host; groups of the first
    size in `blocks` count first. Each size must divide the sizes after it, and the last one the
    number of ranks. The ranks stay in their order unless another order is better.

    >>> placed_ranks([2], [[0, 2], [1, 3]])
    (0, 2, 1, 3)
    >>> placed_ranks([2], [[0, 1], [2, 3]])
    (0, 1, 2, 3)
    """
    ordered = sorted((sorted(each) for each in hosts), key=lambda each: each[0])
    in_order = tuple(sorted(rank for each in ordered for rank in each))
    packed = tuple(_packed(ordered, sorted(blocks, reverse=True)))
    best = _crossings(packed, blocks, hosts) < _crossings(in_order, blocks, hosts)
    return packed if best else in_order


def _packed(parts: Sequence[Sequence[int]], blocks: Sequence[int]) -> list[int]:
    """Returns the ranks so that each part fills as many blocks of the first size as it can.

    The ranks that are left fill blocks of the next size in the same way, and so on.
    """
    if not blocks:
        return [rank for part in parts for rank in part]
    size, *smaller = blocks
    whole = [len(part) // size * size for part in parts]
    rest = [part[count:] for part, count in zip(parts, whole, strict=True)]
    found = [rank for part, count in zip(parts, whole, strict=True) for rank in part[:count]]
    return found + _packed(rest, smaller)


def _crossings(ranks: Sequence[int], blocks: Sequence[int], hosts: Hosts) -> list[int]:
    """Returns, for each size of blocks, the number of blocks with ranks of several hosts."""
    host_of = {rank: number for number, each in enumerate(hosts) for rank in each}
    places = [host_of[rank] for rank in ranks]
    return [
        sum(len(set(places[first : first + size])) > 1 for first in range(0, len(places), size))
        for size in blocks
    ]
