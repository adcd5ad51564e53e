"""Rings along the axes of a grid, one axis after another.

In `blueconnect:4x2`, axis 0 of size 4 is the ranks of a host, and axis 1 of size 2 is the hosts.
Without sizes in the text, the sizes are the `levels` of `build`, or else as equal as possible. n is
the number of ranks, n_i the size of axis i, N the bytes of the whole vector. Bytes are the bytes
that a rank sends.
"""

from __future__ import annotations

from unisono.algorithms import bucket, ring
from unisono.algorithms.grid import Grid, Lines
from unisono.algorithms.parameters import Dims
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import Composer, backwards, in_sequence
from unisono.schedule import Collective, Schedule
from unisono.types import Op


@algorithm(Op.ALL_GATHER, "blueconnect", cost=bucket.gather_cost)
def all_gather(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """All-gather around the rings of each axis, from the last axis to axis 0.

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
    """Reduce-scatter around the rings of each axis, from axis 0 to the last axis.

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Cho et al.
    (2019).
    """
    return backwards(all_gather(ranks, dims=dims))


@algorithm(Op.ALL_REDUCE, "blueconnect", cost=bucket.all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Reduce-scatter along each axis, then all-gather along each axis in the opposite order.

    Rounds: 2 x sum of (n_i - 1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Cho et al.
    (2019).
    """
    gather = all_gather(ranks, dims=dims)
    return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])
