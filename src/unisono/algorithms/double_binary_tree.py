"""Two binary trees over the same ranks, each for half of the vector.

A rank with children in one tree is a leaf in the other tree. So all ranks send and receive at the
full rate, in about log2(n) rounds plus one for each part. The root is the parent of the top rank of
both trees. Edges have colour 0 or 1. The incoming edges of a rank have different colours. The
outgoing edges of a rank also have different colours. The edges of colour 0 are busy in even rounds,
the edges of colour 1 in odd rounds.

n is the number of ranks, and N is the size of the whole vector in bytes. D = floor(log2(n-1)) + 1
is the number of ranks on the longest path down a tree. K is the argument `parts`, the number of
parts that each tree transfers (default 2 D). In the docstrings below, "Bytes" is the number of
bytes that the busiest rank sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _broadcast_cost(ranks: int, *, parts: int | None = None) -> Cost:
    rounds = 2 * (_depth(ranks) + _parts(ranks, parts) - 1)
    return Cost(rounds=rounds, bytes_sent=Fraction(1))


def _reduce_cost(ranks: int, *, parts: int | None = None) -> Cost:
    rounds = 2 * (_depth(ranks) + _parts(ranks, parts) - 1)
    return Cost(rounds=rounds, bytes_sent=Fraction(1), reductions=Fraction(1))


def _all_reduce_cost(ranks: int, *, parts: int | None = None) -> Cost:
    rounds = 2 * (2 * _depth(ranks) + _parts(ranks, parts) - 1)
    sent = Fraction(min(ranks, 4), 2)
    return Cost(rounds=rounds, bytes_sent=sent, reductions=Fraction(1))


@algorithm(Op.BROADCAST, "double_binary_tree", cost=_broadcast_cost)
def broadcast(ranks: int, root: int, *, parts: int | None = None) -> Schedule:
    """The root sends half of the parts down each tree.

    Rounds: 2(D + K - 1). Bytes: N. Source: Sanders, Speck, Träff, "Two-tree algorithms for full
    bandwidth broadcast, reduction and scan" (2009).
    """
    pipeline = _parts(ranks, parts)
    collective = Collective(op=Op.BROADCAST, ranks=ranks, parts=2 * pipeline, root=root)
    b = Builder(collective, "double_binary_tree")
    for edge in _edges(ranks):
        for number in range(pipeline):
            b.round = edge.round + 2 * number
            part = 2 * number + edge.tree
            parent, child = (edge.parent + root) % ranks, (edge.child + root) % ranks
            b.copy(parent, part, child, channel=edge.tree)
    return b.build()


@algorithm(Op.REDUCE, "double_binary_tree", cost=_reduce_cost)
def reduce(ranks: int, root: int, *, parts: int | None = None) -> Schedule:
    """Sends partial sums up both trees to the root. Runs the transfers of the broadcast in reverse
    order and direction.

    Rounds: 2(D + K - 1). Bytes: N. Reductions: N. Source: Sanders, Speck, Träff (2009).
    """
    return backwards(broadcast(ranks, root, parts=parts))


@algorithm(Op.ALL_REDUCE, "double_binary_tree", cost=_all_reduce_cost)
def all_reduce(ranks: int, *, parts: int | None = None) -> Schedule:
    """Reduces each part up its tree to rank 0, then immediately broadcasts the result down the same
    tree.

    Rounds: 2(2D + K - 1). Bytes: 2N, for 3 ranks 3/2 x N, for 2 ranks N. Reductions: N. Source:
    Sanders, Speck, Träff (2009); Jeaugey, "Massively scale your deep learning training with NCCL
    2.4" (2019).
    """
    pipeline = _parts(ranks, parts)
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=2 * pipeline), "double_binary_tree")
    turn = 2 * _depth(ranks)
    for edge in _edges(ranks):
        for number in range(pipeline):
            part = 2 * number + edge.tree
            b.round = turn - 1 - edge.round + 2 * number
            b.reduce(edge.child, part, edge.parent, channel=edge.tree)
            b.round = turn + edge.round + 2 * number
            b.copy(edge.parent, part, edge.child, channel=edge.tree)
    return b.build()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    """An edge from a parent to a child, in a tree whose root is rank 0. The first part moves along
    the edge in round `round`. Each further part follows 2 rounds after the previous part.
    """

    tree: int
    parent: int
    child: int
    round: int


def _depth(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _parts(ranks: int, parts: int | None) -> int:
    return parts or max(1, 2 * _depth(ranks))


def _edges(ranks: int) -> list[_Edge]:
    """Returns all edges of both trees. In each tree, parents come before their children."""
    found = [
        (tree, parent, child, depth)
        for tree in (0, 1)
        for parent, child, depth in _tree(ranks - 1, tree)
    ]
    colours = _colours([(parent, child) for _, parent, child, _ in found])
    return [
        _Edge(tree=tree, parent=parent, child=child, round=2 * depth + colour)
        for (tree, parent, child, depth), colour in zip(found, colours, strict=True)
    ]


def _tree(size: int, tree: int) -> Iterator[tuple[int, int, int]]:
    """Yields (parent, child, depth) for each edge of a tree. The root is rank 0, and ranks 1..size
    are below the root.

    Below the root, the ranks with children are even in tree 0 and odd in tree 1. Tree 1 is the
    mirror image of tree 0 if `size` is even, and tree 0 shifted by one rank if `size` is odd.
    """

    def place(position: int) -> int:
        if tree == 0:
            return position
        return size + 1 - position if size % 2 == 0 else position % size + 1

    def below(parent: int, first: int, count: int, depth: int) -> Iterator[tuple[int, int, int]]:
        if count > 0:
            left = (1 << (count.bit_length() - 1)) - 1
            top = place(first + left)
            yield parent, top, depth
            yield from below(top, first, left, depth + 1)
            yield from below(top, first + left + 1, count - left - 1, depth + 1)

    return below(0, 1, size, 0)


def _colours(edges: list[tuple[int, int]]) -> list[int]:
    """Returns the colour of each edge, 0 or 1. Edges with the same parent or the same child have
    different colours.

    A rank has at most two outgoing and two incoming edges. So edges with a common parent or child
    form paths and even cycles, along which the colours alternate.
    """
    sharing: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, (parent, child) in enumerate(edges):
        sharing["out", parent].append(i)
        sharing["in", child].append(i)
    colours = [-1] * len(edges)
    for start in range(len(edges)):
        if colours[start] >= 0:
            continue
        colours[start] = 0
        waiting = [start]
        while waiting:
            edge = waiting.pop()
            parent, child = edges[edge]
            for other in (*sharing["out", parent], *sharing["in", child]):
                if colours[other] < 0:
                    colours[other] = 1 - colours[edge]
                    waiting.append(other)
    return colours
