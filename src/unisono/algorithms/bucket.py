"""The bucket algorithm on a torus: rings along each axis, with all axes busy at the same time.

`bucket:4x4` is a torus of two axes (also written `torus:4x4`). The vector is cut into one shard per
axis and direction. Shard i moves around axis i first, then around the next axis, and so on. On a
torus with equal sides, two shards never use a link at the same time, and all links are always busy.
`ways=1` halves the number of shards, and all shards move in the same direction. If the string has
no sizes, the argument `levels` of `build` gives the sizes. Without this argument, the algorithm
uses two sizes that are as equal as possible.

n is the number of ranks and n_i the size of axis i. N is the size of the whole vector in bytes. In
the docstrings below, "Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from unisono.algorithms import ring
from unisono.algorithms.algorithm_spec import Dims, check_dims
from unisono.algorithms.cost import Cost, of_all_gather, scatter_then_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.grid import Grid, Lines, near_square
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import Composer, backwards, in_sequence, on_ranks
from unisono.errors import UnsupportedError
from unisono.schedule import Collective, Schedule
from unisono.types import Op


def gather_cost(ranks: int, *, dims: Dims | None = None, ways: int = 2) -> Cost:
    """Returns the cost of `all_gather`. The cost does not depend on the number of directions
    (`ways`).
    """
    _check_ways(ways)
    rounds = sum(size - 1 for size in axes_of(ranks, dims))
    return of_all_gather(rounds, ranks - 1, ranks)


def scatter_cost(ranks: int, *, dims: Dims | None = None, ways: int = 2) -> Cost:
    """Returns the cost of `reduce_scatter`, which runs the all-gather in reverse."""
    return backwards_cost(gather_cost(ranks, dims=dims, ways=ways), ranks)


def all_reduce_cost(ranks: int, *, dims: Dims | None = None, ways: int = 2) -> Cost:
    """Returns the cost of `all_reduce`: the reduce-scatter plus the all-gather."""
    return scatter_then_gather(gather_cost(ranks, dims=dims, ways=ways), ranks)


@algorithm(Op.ALL_GATHER, "bucket", cost=gather_cost)
def all_gather(ranks: int, *, dims: Dims | None = None, ways: int = 2) -> Schedule:
    """Cuts each piece into shards, and sends each shard around the rings of one axis after another.
    On a torus with equal sides, two shards never use a link at the same time.

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N. Source: Jain and Sabharwal, "Optimal bucket
    algorithms for large MPI collectives on torus interconnects" (2010); simultaneous shards: Sack
    and Gropp, "Collective algorithms for multiported torus networks" (2015).
    """
    _check_ways(ways)
    grid = Grid(dims=axes_of(ranks, dims))
    axes = range(len(grid.dims))
    shards = ways * len(axes)
    composer = Composer(Collective(op=Op.ALL_GATHER, ranks=ranks, parts=shards), 1)
    there = {axis: ring.all_gather(grid.dims[axis]) for axis in axes}
    back = {axis: on_ranks(part, _turned(grid.dims[axis])) for axis, part in there.items()}
    for shard in range(shards):
        direction, axis = divmod(shard, len(axes))
        lines = Lines(
            composer=composer,
            grid=grid,
            shares=grid,
            stride=shards,
            offset=shard,
            channel=shard,
        )
        lines.gather([*axes[axis:], *axes[:axis]], back if direction else there)
    return composer.build()


@algorithm(Op.REDUCE_SCATTER, "bucket", cost=scatter_cost)
def reduce_scatter(ranks: int, *, dims: Dims | None = None, ways: int = 2) -> Schedule:
    """Runs the transfers of the all-gather in reverse order and direction.

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Jain and
    Sabharwal (2010); Sack and Gropp (2015).
    """
    return backwards(all_gather(ranks, dims=dims, ways=ways))


@algorithm(Op.ALL_REDUCE, "bucket", cost=all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None, ways: int = 2) -> Schedule:
    """Runs a reduce-scatter along each axis, then an all-gather along each axis. Each shard has its
    own order of axes.

    Rounds: 2 x sum of (n_i - 1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Jain and
    Sabharwal (2010); Sack and Gropp (2015).
    """
    gather = all_gather(ranks, dims=dims, ways=ways)
    return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])


def axes_of(ranks: int, dims: Dims | None) -> Dims:
    """Returns the given sizes of the axes, or two sizes that are as equal as possible."""
    return check_dims(dims or near_square(ranks, 2), ranks)


def _turned(size: int) -> list[int]:
    """Returns the ranks of a ring in the opposite direction."""
    return [-rank % size for rank in range(size)]


def _check_ways(ways: int) -> None:
    if ways not in (1, 2):
        raise UnsupportedError(f"bucket: expected ways to be 1 or 2, got {ways}")
