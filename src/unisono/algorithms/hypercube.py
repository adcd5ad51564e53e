"""Dimension exchange: exchanges along the dimensions of a hypercube, one dimension after another.

If n is not a power of two, the dimensions are the prime factors of n (a generalised hypercube).
`dims` overrides the dimensions. The ranks along one dimension exchange data directly. n is the
number of ranks and n_i the size of dimension i. N is the size of the whole vector in bytes (all
pieces of a rank). In the docstrings below, "Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms import direct, one_shot
from unisono.algorithms.algorithm_spec import Dims, check_dims
from unisono.algorithms.cost import Cost, of_all_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.grid import Grid, Lines, exchange
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import Composer, backwards
from unisono.schedule import Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    return of_all_gather(_used(_sizes(ranks, dims)), ranks - 1, ranks)


def _scatter_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    return backwards_cost(_gather_cost(ranks, dims=dims), ranks)


def _all_reduce_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    sizes = _sizes(ranks, dims)
    whole = Fraction(sum(size - 1 for size in sizes))
    return Cost(rounds=_used(sizes), bytes_sent=whole, reductions=whole)


def _all_to_all_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    sizes = _sizes(ranks, dims)
    sent = sum((Fraction(size - 1, size) for size in sizes), Fraction(0))
    return Cost(rounds=_used(sizes), bytes_sent=sent)


@algorithm(Op.ALL_REDUCE, "hypercube", cost=_all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Exchanges whole partial sums among the ranks along each dimension.

    Rounds: the number of dimensions, log2(n) for a hypercube. Bytes: sum of (n_i - 1), x N; log2(n)
    x N for a hypercube. Reductions: the same. Source: Fox et al., "Solving problems on concurrent
    processors" (1988); Bhuyan and Agrawal, "Generalized hypercube and hyperbus structures for a
    computer network" (1984).
    """
    grid = Grid(dims=_sizes(ranks, dims))
    composer = Composer(Collective(op=Op.ALL_REDUCE, ranks=ranks), 1)
    lines = Lines(composer=composer, grid=grid, shares=Grid(dims=(1,) * len(grid.dims)))
    start = 0
    for axis, size in enumerate(grid.dims):
        start = lines.add(axis, one_shot.all_reduce(size), start=start, free=())
    return composer.build()


@algorithm(Op.ALL_GATHER, "hypercube", cost=_gather_cost)
def all_gather(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Exchanges all pieces among the ranks along each dimension.

    Rounds: the number of dimensions. Bytes: (n-1)/n x N. Source: Johnsson and Ho, "Optimum
    broadcasting and personalized communication in hypercubes" (1989), all-to-all broadcasting.
    """
    grid = Grid(dims=_sizes(ranks, dims))
    composer = Composer(Collective(op=Op.ALL_GATHER, ranks=ranks), 1)
    parts = {axis: direct.all_gather(size) for axis, size in enumerate(grid.dims)}
    Lines(composer=composer, grid=grid, shares=grid).gather(range(len(grid.dims)), parts)
    return composer.build()


@algorithm(Op.REDUCE_SCATTER, "hypercube", cost=_scatter_cost)
def reduce_scatter(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs the transfers of the all-gather in reverse order and direction.

    Rounds: the number of dimensions. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Johnsson
    and Ho (1989), reversed.
    """
    return backwards(all_gather(ranks, dims=dims))


@algorithm(Op.ALL_TO_ALL, "hypercube", cost=_all_to_all_cost)
def all_to_all(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Moves each piece along one dimension after another, to the destination's coordinate in that
    dimension.

    Rounds: the number of dimensions. Bytes: sum of (n_i - 1)/n_i, x N; log2(n)/2 x N for a
    hypercube. Source: Johnsson and Ho (1989), all-to-all personalized communication.
    """
    grid = Grid(dims=_sizes(ranks, dims))
    composer = Composer(Collective(op=Op.ALL_TO_ALL, ranks=ranks), 1)
    exchange(composer, grid, {axis: direct.all_to_all(n) for axis, n in enumerate(grid.dims)})
    return composer.build()


def _sizes(ranks: int, dims: Dims | None) -> Dims:
    if dims is not None:
        return check_dims(dims, ranks)
    sizes = []
    factor = 2
    while ranks > 1:
        while ranks % factor == 0:
            sizes.append(factor)
            ranks //= factor
        factor += 1
    return tuple(sizes) or (1,)


def _used(sizes: Dims) -> int:
    return sum(1 for size in sizes if size > 1)
