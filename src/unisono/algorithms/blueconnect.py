"""Rings along the axes of a grid, one axis after another.

`blueconnect:4x2`: axis 0 of 4, the ranks of a host; axis 1 of 2, the hosts. The sizes are the
`levels` that `build` is given, or as equal as can be, unless they are written. n is the number of
ranks, n_i the size of axis i, N the bytes of the whole vector; bytes are those a rank sends.
"""

from __future__ import annotations

from unisono.algorithms import bucket, ring
from unisono.algorithms.compose import Composer, backwards, in_sequence
from unisono.algorithms.grid import Grid, Lines
from unisono.algorithms.parameters import Dims
from unisono.algorithms.registry import algorithm
from unisono.schedule import Collective, Schedule
from unisono.types import Op


@algorithm(Op.ALL_GATHER, "blueconnect", cost=bucket.gather_cost)
def all_gather(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """All-gather around the rings along the last axis, ..., at last along axis 0.

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N, of it (n_i - 1)/(n_0 ... n_i) x N along axis i.
    Source: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
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
    """Reduce-scatter around the rings along axis 0, then axis 1, ...

    Rounds: sum of (n_i - 1). Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Cho et al.
    (2019).
    """
    return backwards(all_gather(ranks, dims=dims))


@algorithm(Op.ALL_REDUCE, "blueconnect", cost=bucket.all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Reduce-scatter along each axis, then all-gather along each, in the opposite order.

    Rounds: 2 x sum of (n_i - 1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Cho et al.
    (2019).
    """
    gather = all_gather(ranks, dims=dims)
    return in_sequence(Op.ALL_REDUCE, [backwards(gather), gather])
