"""Swing: halving and doubling between near ranks, with shorter paths on a ring or torus.

In step s the partner is at distance (1 - (-2)^(s+1)) / 3: 1, -1, 3, -5, 11, ... For odd ranks, the
distance has the opposite sign. On a torus (`dims`, powers of two), the steps alternate between the
axes. n is the number of ranks. m is the largest power of two that is at most n. e = n - m is the
number of extra ranks (see `power_of_two_ranks`). N is the size of the whole vector in bytes. In the
docstrings below, "Bytes" is the number of bytes that the busiest rank sends.
"""

from __future__ import annotations

from math import prod

import numpy as np

from unisono.algorithms import power_of_two_ranks
from unisono.algorithms.algorithm_spec import Dims, check_dims
from unisono.algorithms.cost import Cost, scatter_then_gather
from unisono.algorithms.cost import backwards as backwards_cost
from unisono.algorithms.grid import Grid
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import backwards, in_channels
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _gather_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    _torus(ranks, dims)
    return power_of_two_ranks.all_gather_cost(ranks)


def _scatter_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    return backwards_cost(_gather_cost(ranks, dims=dims), ranks)


def _all_reduce_cost(ranks: int, *, dims: Dims | None = None, ports: int = 1) -> Cost:
    _torus(ranks, dims)

    def of_members(members: int) -> Cost:
        return scatter_then_gather(power_of_two_ranks.all_gather_cost(members), members)

    return power_of_two_ranks.all_reduce_cost(ranks, of_members)


@algorithm(Op.ALL_GATHER, "swing", cost=_gather_cost, exact=False)
def all_gather(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Exchanges all pieces between partners in each step, first with far partners, last with near
    partners.

    Rounds: log2(m), and 2 more if e > 0. Bytes: (n-1)/n x N for powers of two, else at most (m-1 +
    n-1 + sum of min(2^k, e) over k < log2(m))/n x N. Source: De Sensi et al., "Swing: short-cutting
    rings for higher bandwidth allreduce" (NSDI 2024), its second half.
    """
    shape = _torus(ranks, dims)
    return power_of_two_ranks.all_gather(ranks, lambda members: _partners(shape or (members,)))


@algorithm(Op.REDUCE_SCATTER, "swing", cost=_scatter_cost, exact=False)
def reduce_scatter(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """In each step, each rank sends its partner the half of its remaining pieces that the partner
    must reduce. Near partners come first, far partners last.

    Rounds: log2(m), and 2 more if e > 0. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N for powers of
    two, else at most (m-1 + n-1 + sum of min(2^k, e) over k < log2(m))/n x N. Source: De Sensi et
    al. (2024), its first half.
    """
    return backwards(all_gather(ranks, dims=dims))


@algorithm(Op.ALL_REDUCE, "swing", cost=_all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None, ports: int = 1) -> Schedule:
    """Runs a reduce-scatter from near to far partners, then an all-gather from far to near
    partners. If `ports` is the number of ports of a rank in a torus, each port transfers a share of
    the vector.

    Rounds: 2 log2(m), and 2 more if e > 0. Bytes: 2(m-1)/m x N, and N more if e > 0. Reductions:
    (m-1)/m x N, and N more if e > 0. Source: De Sensi et al. (2024), the bandwidth optimal form;
    the extra ranks as in Thakur et al. (2005).
    """
    shape = _torus(ranks, dims)

    def of_members(members: int) -> Schedule:
        dims = shape or (members,)
        if ports == 1:
            return _in_halves(dims)
        return _on_all_ports(dims, ports)

    return power_of_two_ranks.all_reduce(ranks, of_members)


def _in_halves(dims: Dims) -> Schedule:
    """Returns the all-reduce for a number of ranks that is a power of two.

    Parts are numbered so that the parts of each transfer are adjacent. The parts of ranks that
    exchange in the last steps have adjacent numbers.
    """
    partners = [np.array(partner) for partner in _partners(dims)]
    rank = np.arange(prod(dims))
    first, lead = np.zeros_like(rank), rank
    for step, partner in enumerate(partners):
        first = first + (lead > lead[partner]) * (1 << step)
        lead = np.minimum(lead, lead[partner])
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=len(rank), parts=len(rank)), "swing")
    for step, partner in reversed(list(enumerate(partners))):
        b.reduce(rank, first[partner] >> step << step, partner, count=1 << step)
        b.next_round()
    for step, partner in enumerate(partners):
        b.copy(rank, first >> step << step, partner, count=1 << step)
        b.next_round()
    return b.build()


def _on_all_ports(dims: Dims, ports: int) -> Schedule:
    """Returns an all-reduce with a share of the vector for each port. Each share starts along its
    own axis, in its own direction.
    """
    if ports != 2 * len(dims):
        raise UnsupportedError(
            f"swing: expected {2 * len(dims)} ports for {len(dims)} axes, got {ports}"
        )
    grid = Grid(dims=dims)
    parts, orders = [], []
    for turn in range(len(dims)):
        turned = Grid(dims=dims[turn:] + dims[:turn])
        for direction in (1, -1):
            parts.append(_in_halves(turned.dims))
            orders.append(
                [_turned(grid, turned.coords(r), turn, direction) for r in range(grid.size)]
            )
    return in_channels(parts, orders)


def _turned(grid: Grid, coords: tuple[int, ...], turn: int, direction: int) -> int:
    """Returns the rank at these coordinates. The first coordinate belongs to axis `turn`, the
    second to the next axis, and so on. Axis 0 follows the last axis. `direction` -1 negates all
    coordinates.
    """
    back = coords[-turn:] + coords[:-turn] if turn else coords
    return grid.number([direction * at % size for at, size in zip(back, grid.dims, strict=True)])


def _torus(ranks: int, dims: Dims | None) -> Dims | None:
    if dims is None:
        return None
    if any(size & (size - 1) for size in check_dims(dims, ranks)):
        raise UnsupportedError("swing: expected powers of two as dims")
    return dims


def _partners(dims: Dims) -> list[list[int]]:
    """Returns the partner of each rank in each step, starting with the last step of the
    reduce-scatter.
    """
    grid = Grid(dims=dims)
    depth = max(size.bit_length() for size in dims)
    turns = [
        (step, axis)
        for step in range(depth)
        for axis, size in enumerate(dims)
        if size >> (step + 1)
    ]
    found = []
    for step, axis in reversed(turns):
        distance = (1 - (-2) ** (step + 1)) // 3
        partners = []
        for member in range(grid.size):
            coords = list(grid.coords(member))
            direction = -1 if coords[axis] % 2 else 1
            coords[axis] = (coords[axis] + direction * distance) % dims[axis]
            partners.append(grid.number(coords))
        found.append(partners)
    return found
