"""Prefix reductions: rank r receives the reduction over ranks 0..r (scan) or 0..r-1 (exscan).

An exscan first moves every vector to the next rank, then scans over all ranks except the first.
Partial results always cover consecutive ranks and are combined in rank order. n is the number of
ranks, and N is the size of the whole vector in bytes. "Bytes" is an upper bound for each rank.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _steps(ranks: int) -> int:
    """Returns the number of steps of recursive doubling among `ranks` ranks: ceil(log2(ranks))."""
    return (ranks - 1).bit_length()


def _after_shift(ranks: int, scan: Cost) -> Cost:
    """Returns the cost of an exscan: a shift by one rank, then a scan over all ranks except the
    first. `scan` is the cost of this scan.
    """
    shift = Cost(rounds=1, bytes_sent=Fraction(1))
    return shift + scan if ranks > 2 else shift


def _direct_cost(ranks: int) -> Cost:
    return Cost(rounds=1, bytes_sent=Fraction(ranks - 1), reductions=Fraction(ranks - 1))


def _doubling_cost(ranks: int) -> Cost:
    steps = _steps(ranks)
    return Cost(rounds=steps, bytes_sent=Fraction(steps), reductions=Fraction(steps))


def _chain_cost(ranks: int, hops: int | None = None) -> Cost:
    parts, hops = 2 * (ranks - 1), ranks - 1 if hops is None else hops
    return Cost(rounds=parts + hops - 1, bytes_sent=Fraction(1), reductions=Fraction(1))


@algorithm(Op.SCAN, "direct", cost=_direct_cost)
def scan_direct(ranks: int) -> Schedule:
    """Every rank reads the vectors of all lower ranks and reduces them in rank order.

    Rounds: 1. Bytes: (n-1) x N, at rank 0 (in shared memory, each rank writes N only once).
    Reductions: (n-1) x N, at the last rank. Source: the one-shot all-reduce of MSCCL++ ("all
    pairs"), each rank with its prefix.
    """
    b = Builder(Collective(op=Op.SCAN, ranks=ranks), "direct")
    _direct(b, first=0)
    return b.build()


@algorithm(Op.EXSCAN, "direct", cost=lambda ranks: _after_shift(ranks, _direct_cost(ranks - 1)))
def exscan_direct(ranks: int) -> Schedule:
    """Shifts every vector to the next rank, then runs a direct scan.

    Rounds: 2. Bytes: (n-1) x N, at rank 1. Reductions: (n-2) x N. Source: as for scan; the shift as
    in Träff (2025), see `exscan_recursive_doubling`.
    """
    b = Builder(Collective(op=Op.EXSCAN, ranks=ranks), "direct")
    _shift(b)
    _direct(b, first=1)
    return b.build()


@algorithm(Op.SCAN, "recursive_doubling", cost=_doubling_cost)
def scan_recursive_doubling(ranks: int) -> Schedule:
    """Each rank r sends its partial sum of 2^k ranks to rank r + 2^k in round k.

    Rounds: ceil(log2(n)). Bytes: ceil(log2(n)) x N. Reductions: the same. Source: Hillis and
    Steele, "Data parallel algorithms" (1986), sum of partial sums; for MPI Sanders and Träff,
    "Parallel prefix (scan) algorithms for MPI" (2006).
    """
    b = Builder(Collective(op=Op.SCAN, ranks=ranks), "recursive_doubling")
    _doubling(b, first=0)
    return b.build()


@algorithm(
    Op.EXSCAN,
    "recursive_doubling",
    cost=lambda ranks: _after_shift(ranks, _doubling_cost(ranks - 1)),
)
def exscan_recursive_doubling(ranks: int) -> Schedule:
    """Shifts every vector to the next rank, then scans by recursive doubling.

    Rounds: 1 + ceil(log2(n-1)). Bytes: (1 + ceil(log2(n-1))) x N. Reductions: ceil(log2(n-1)) x N.
    Source: the conventional algorithm according to Träff, "Communication round and computation
    efficient exclusive prefix-sums algorithms (for MPI_Exscan)" (2025), abstract.
    """
    b = Builder(Collective(op=Op.EXSCAN, ranks=ranks), "recursive_doubling")
    _shift(b)
    _doubling(b, first=1)
    return b.build()


@algorithm(Op.SCAN, "chain", cost=_chain_cost)
def scan_chain(ranks: int) -> Schedule:
    """Sends the prefixes along the chain 0, 1, ..., n-1, with their parts in a pipeline.

    Parts: p = 2(n-1). Rounds: p+n-2. Bytes: N, none at the last rank. Reductions: N. Source: the
    linear pipeline of Sanders and Träff (2006).
    """
    b = Builder(Collective(op=Op.SCAN, ranks=ranks, parts=max(1, 2 * (ranks - 1))), "chain")
    _chain(b, first=0)
    return b.build()


@algorithm(
    Op.EXSCAN, "chain", cost=lambda ranks: _after_shift(ranks, _chain_cost(ranks, ranks - 2))
)
def exscan_chain(ranks: int) -> Schedule:
    """Shifts every vector to the next rank, then scans along the chain.

    Parts: p = 2(n-1). Rounds: p+n-2. Bytes: 2N, only N at rank 0, none at the last rank.
    Reductions: N. Source: the pipeline of Sanders and Träff (2006) after the shift of Träff (2025).
    """
    b = Builder(Collective(op=Op.EXSCAN, ranks=ranks, parts=max(1, 2 * (ranks - 1))), "chain")
    _shift(b)
    _chain(b, first=1)
    return b.build()


def _shift(b: Builder) -> None:
    """Copies each rank's vector to the next rank, where it replaces that rank's vector."""
    rank = np.arange(b.collective.ranks - 1)
    b.copy(rank, 0, rank + 1, count=b.collective.parts)
    b.next_round()


def _direct(b: Builder, *, first: int) -> None:
    below, rank = np.triu_indices(b.collective.ranks - first, k=1)
    b.reduce(below + first, 0, rank + first)


def _doubling(b: Builder, *, first: int) -> None:
    ranks = b.collective.ranks
    distance = 1
    while distance < ranks - first:
        rank = np.arange(first, ranks - distance)
        b.reduce(rank, 0, rank + distance)
        b.next_round()
        distance *= 2


def _chain(b: Builder, *, first: int) -> None:
    ranks, parts = b.collective.ranks, b.collective.parts
    hop = np.arange(ranks - 1 - first)
    for number in range(parts + len(hop) - 1):
        part = number - hop  # the part that each hop transfers in this round
        busy = hop[(part >= 0) & (part < parts)]
        b.reduce(busy + first, number - busy, busy + first + 1)
        b.next_round()
