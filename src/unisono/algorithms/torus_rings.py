"""Rings that visit all ranks of a torus along its links and share no link.

A torus of two axes with at least 3 ranks each (such as `torus_rings:4x4`) has two Hamiltonian
cycles that share no link. Each cycle is used in both directions. So four quarters of the vector
keep all four links of a rank busy. Any other shape has one cycle, also used in both directions. If
the string has no sizes, the argument `levels` of `build` gives the sizes. Without this argument,
the sizes are as equal as possible. n is the number of ranks, and N is the size of the whole vector
in bytes. In the docstrings below, "Bytes" is the number of bytes that a rank sends.
"""

from __future__ import annotations

from unisono.algorithms import ring
from unisono.algorithms.algorithm_spec import Dims, check_dims
from unisono.algorithms.cost import Cost
from unisono.algorithms.grid import near_square
from unisono.algorithms.hamiltonian import hamiltonian_cycles
from unisono.algorithms.registry import algorithm
from unisono.algorithms.schedule_composition import in_channels
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.types import Op


def _all_reduce_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    _torus(ranks, dims)
    return ring.all_reduce_cost(ranks)


def _scatter_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    _torus(ranks, dims)
    return ring.reduce_scatter_cost(ranks)


def _gather_cost(ranks: int, *, dims: Dims | None = None) -> Cost:
    _torus(ranks, dims)
    return ring.all_gather_cost(ranks)


@algorithm(Op.ALL_REDUCE, "torus_rings", cost=_all_reduce_cost)
def all_reduce(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs an all-reduce around each cycle in each direction, with equal shares of the vector.

    Rounds: 2(n-1). Bytes: 2(n-1)/n x N. Reductions: (n-1)/n x N. Source: Hoefler et al.,
    "HammingMesh: a network topology for large-scale deep learning" (2022); the cycles: Bae,
    AlBdaiwi, Bose, "Edge-disjoint Hamiltonian cycles in two-dimensional torus" (2004).
    """
    orders = _orders(ranks, dims)
    return in_channels([ring.all_reduce(ranks)] * len(orders), orders)


@algorithm(Op.REDUCE_SCATTER, "torus_rings", cost=_scatter_cost)
def reduce_scatter(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs a reduce-scatter around each cycle in each direction, with equal shares of each piece.

    Rounds: n-1. Bytes: (n-1)/n x N. Reductions: (n-1)/n x N. Source: Hoefler et al. (2022).
    """
    orders = _orders(ranks, dims)
    return in_channels([ring.reduce_scatter(ranks)] * len(orders), orders)


@algorithm(Op.ALL_GATHER, "torus_rings", cost=_gather_cost)
def all_gather(ranks: int, *, dims: Dims | None = None) -> Schedule:
    """Runs an all-gather around each cycle in each direction, with equal shares of each piece.

    Rounds: n-1. Bytes: (n-1)/n x N. Source: Hoefler et al. (2022).
    """
    orders = _orders(ranks, dims)
    return in_channels([ring.all_gather(ranks)] * len(orders), orders)


def _torus(ranks: int, dims: Dims | None) -> Dims:
    used = tuple(size for size in dims or near_square(ranks, 2) if size > 1) or (1,)
    if len(used) > 2:
        raise UnsupportedError("torus_rings: expected one or two axes with more than one rank")
    check_dims(dims or used, ranks)
    return used


def _orders(ranks: int, dims: Dims | None) -> list[list[int]]:
    cycles = hamiltonian_cycles(_torus(ranks, dims))
    return [order for cycle in cycles for order in (cycle, cycle[::-1])]
