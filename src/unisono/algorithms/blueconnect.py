"""BlueConnect: ring algorithms along the axes of a grid of ranks, one axis after another.

In `blueconnect:4x2`, axis 0 has the 4 ranks of a host, and axis 1 has the 2 hosts. If the string
has no sizes, the argument `levels` of `build` gives the sizes. Without this argument, the sizes are
as equal as possible. n is the number of ranks and n_i the size of axis i. N is the size of the
whole vector in bytes. In the docstrings below, "Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from unisono.algorithms import bucket, ring
from unisono.algorithms.algorithm_spec import Dims
from unisono.algorithms.grid import Grid, Lines
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import Composer, backwards, in_sequence
from unisono.schedule import Collective, Schedule
from unisono.types import Op


@algorithm(Op.ALL_GATHER, "blueconnect", cost=bucket.gather_cost)
def all_gather(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs a ring all-gather along each axis, from the last axis to axis 0.

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N, including (n_i - 1)/(n_0 ... n_i) x N along axis
    i. Source: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
    network hierarchy" (2019).
    """
    grid = Grid(dims=bucket.axes_of(ranks, dims))
    composer = Composer(Collective(op=Op.ALL_GATHER, ranks=ranks), 1)
    parts = {axis: ring.all_gather(size) for axis, size in enumerate(grid.dims)}
    lines = Lines(composer=composer, grid=grid, shares=grid)
    lines.gather(range(len(grid.dims) - 1, -1, -1), parts)
    return composer.build()


@algorithm(Op.REDUCE_SCATTER, "blueconnect", cost=bucket.scatter_cost)
def reduce_scatter(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs a ring reduce-scatter along each axis, from axis 0 to the last axis.

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Cho et al.
    (2019).
    """
    return backwards(all_gather(ranks, dims=dims))


@algorithm(Op.ALL_REDUCE, "blueconnect", cost=bucket.all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs a reduce-scatter along each axis, then an all-gather along each axis in the opposite
    order.

    Rounds: 2 x sum of (n_i - 1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Cho et al.
    (2019).
    """
    gather = all_gather(ranks, dims=dims)
    return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])
