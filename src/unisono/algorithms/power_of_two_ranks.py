"""Pairwise exchanges among 2^k ranks, and their extension to any number of ranks.

If n is not a power of two, the first 2e ranks form pairs, where e is n minus the largest power of
two that is at most n. The even rank of a pair sends its data to the odd rank before the exchange,
and receives the result after the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from unisono.algorithms.cost import Cost
from unisono.algorithms.schedule_composition import Composer, runs
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op

Partners: TypeAlias = Sequence[Sequence[int]]
"""Partner of each member in each step. If a is the partner of b, then b is the partner of a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The ranks that take part in the exchange (members), and the number of extra ranks.

    Members are numbered 0..members-1. Each member below `extra` represents two ranks.

    >>> fold = Fold.of(5)
    >>> fold.members, [fold.rank(member) for member in range(4)], fold.ranks_of(0)
    (4, [1, 2, 3, 4], (0, 1))
    """

    members: int
    extra: int

    @classmethod
    def of(cls, ranks: int) -> Fold:
        """Returns the numbers of members and extra ranks for this number of ranks."""
        members = 1 << (ranks.bit_length() - 1)
        return cls(members=members, extra=ranks - members)

    @property
    def steps(self) -> int:
        """Number of steps of an exchange that reaches all members: log2(members)."""
        return self.members.bit_length() - 1

    @property
    def extra_rounds(self) -> int:
        """Number of rounds before and after the exchange together: 2 if there are extra ranks, else
        0.
        """
        return 2 if self.extra else 0

    def rank(self, member: int) -> int:
        """Returns the rank of this member."""
        return 2 * member + 1 if member < self.extra else member + self.extra

    def ranks_of(self, member: int) -> tuple[int, ...]:
        """Returns the ranks that the member represents."""
        rank = self.rank(member)
        return (rank - 1, rank) if member < self.extra else (rank,)


def hypercube_partners(members: int) -> list[list[int]]:
    """Returns the partner of each member in each step. In step k, partners are at distance 2^k."""
    return [
        [member ^ (1 << step) for member in range(members)]
        for step in range(members.bit_length() - 1)
    ]


def all_gather(ranks: int, partners_of: Callable[[int], Partners]) -> Schedule:
    """Returns an all-gather in which partners exchange all their pieces in each step."""
    fold = Fold.of(ranks)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "all_gather")
    for pair in range(fold.extra):
        b.copy(2 * pair, 2 * pair, 2 * pair + 1)
    if fold.extra:
        b.next_round()
    held = [list(fold.ranks_of(member)) for member in range(fold.members)]
    for partners in partners_of(fold.members):
        for member, partner in enumerate(partners):
            for first, count in runs(held[member]):
                b.copy(fold.rank(member), first, fold.rank(partner), count=count)
        b.next_round()
        held = [held[member] + held[partner] for member, partner in enumerate(partners)]
    for pair in range(fold.extra):
        even = 2 * pair
        if even > 0:
            b.copy(even + 1, 0, even, count=even)
        b.copy(even + 1, even + 1, even, count=ranks - even - 1)
    return b.build()


def all_reduce(ranks: int, of_members: Callable[[int], Schedule]) -> Schedule:
    """Extends an all-reduce among 2^k ranks to any number of ranks."""
    fold = Fold.of(ranks)
    inner = of_members(fold.members)
    if not fold.extra:
        return inner
    parts = inner.collective.parts
    composer = Composer(Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=parts), parts)
    b = composer.builder
    for pair in range(fold.extra):
        b.reduce(2 * pair, 0, 2 * pair + 1, count=parts)
    members = [fold.rank(member) for member in range(fold.members)]
    b.round = composer.add(inner, members, [[0]], start=1)
    for pair in range(fold.extra):
        b.copy(2 * pair + 1, 0, 2 * pair, count=parts)
    return composer.build()


def all_gather_cost(ranks: int) -> Cost:
    """Returns the cost of `all_gather`. The cost is an upper bound if members that represent two
    ranks are not adjacent.
    """
    fold = Fold.of(ranks)
    pieces = sum((1 << step) + min(1 << step, fold.extra) for step in range(fold.steps))
    if fold.extra:
        pieces += ranks - 1
    return Cost(rounds=fold.steps + fold.extra_rounds, bytes_sent=Fraction(pieces, ranks))


def all_reduce_cost(ranks: int, of_members: Callable[[int], Cost]) -> Cost:
    """Returns the cost of `all_reduce`. `of_members` returns the cost of the exchange among the
    members. If there are extra ranks, the odd rank of each pair also reduces N bytes and sends N
    bytes.
    """
    fold = Fold.of(ranks)
    more = Fraction(1 if fold.extra else 0)
    return of_members(fold.members) + Cost(
        rounds=fold.extra_rounds, bytes_sent=more, reductions=more
    )
