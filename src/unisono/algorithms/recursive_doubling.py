"""Exchange with partners at doubling distances: about log2(n) rounds, for short messages.

When n is no power of two, the first 2e ranks (e = n minus the largest power of two in n) pair up:
the even rank of a pair hands its data to the odd one before, and gets the result after.
n is the number of ranks, N the bytes of the whole vector; bytes are those a rank sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


@algorithm(Op.ALL_REDUCE, "recursive_doubling")
def all_reduce(ranks: int) -> Schedule:
    """In round k each rank exchanges its partial sum with the partner at distance 2^k.

    Rounds: log2(n), and 2 more when n is no power of two. Bytes: log2(n) x N.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations
    in MPICH" (2005), section 4.5.
    """
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks), "recursive_doubling")
    fold = _Fold.of(ranks)
    for pair in range(fold.extra):
        b.reduce(2 * pair, 0, 2 * pair + 1)
    b.next_round()
    distance = 1
    while distance < fold.members:
        for member in range(fold.members):
            b.reduce(fold.rank(member), 0, fold.rank(member ^ distance))
        b.next_round()
        distance *= 2
    for pair in range(fold.extra):
        b.copy(2 * pair + 1, 0, 2 * pair)
    return b.build()


@algorithm(Op.ALL_GATHER, "recursive_doubling")
def all_gather(ranks: int) -> Schedule:
    """In round k each rank exchanges all it has with the partner at distance 2^k.

    Rounds: log2(n), and 2 more when n is no power of two. Bytes: (n-1)/n x N for powers of two,
    up to twice that otherwise. Source: Thakur, Rabenseifner, Gropp (2005), section 4.1.
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=ranks), "recursive_doubling")
    fold = _Fold.of(ranks)
    for pair in range(fold.extra):
        b.copy(2 * pair, 2 * pair, 2 * pair + 1)
    b.next_round()
    distance = 1
    while distance < fold.members:
        for member in range(fold.members):
            group = member - member % distance
            first, end = fold.first_chunk(group), fold.first_chunk(group + distance)
            b.copy(fold.rank(member), first, fold.rank(member ^ distance), count=end - first)
        b.next_round()
        distance *= 2
    for pair in range(fold.extra):
        even = 2 * pair
        if even > 0:
            b.copy(even + 1, 0, even, count=even)
        b.copy(even + 1, even + 1, even, count=ranks - even - 1)
    return b.build()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """Which ranks take part in the doubling, and how many stand aside.

    Members are numbered 0..members-1; members below `extra` speak for two ranks.
    """

    members: int
    extra: int

    @classmethod
    def of(cls, ranks: int) -> _Fold:
        members = 1 << (ranks.bit_length() - 1)
        return cls(members=members, extra=ranks - members)

    def rank(self, member: int) -> int:
        return 2 * member + 1 if member < self.extra else member + self.extra

    def first_chunk(self, member: int) -> int:
        """The first of the ranks that members from `member` on speak for."""
        return 2 * member if member < self.extra else member + self.extra
