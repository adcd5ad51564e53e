"""Every algorithm computes the same results as NumPy, with and without parameters, also in the C++
core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cases_in_turn import turn
from unisono import Communicator
from unisono.algorithms import build, names
from unisono.execution import reference
from unisono.schedule import Schedule, lower
from unisono.types import DType, Op, ReduceOp

from .test_algorithms import WITH_PARAMETERS

if TYPE_CHECKING:
    from ranks import Threads

Array = NDArray[np.int64]

LENGTH = 21


def inputs_of(schedule: Schedule) -> list[list[Array]]:
    """Returns random inputs: for each rank a list of arrays, one for each of its input pieces."""
    rng = np.random.default_rng(7)
    collective = schedule.collective
    return [
        [rng.integers(-99, 99, LENGTH) for _ in range(collective.input_pieces(rank))]
        for rank in range(collective.ranks)
    ]


def expected(schedule: Schedule, inputs: list[list[Array]], rank: int) -> list[Array]:
    """Returns a list of a rank's expected output pieces, computed by NumPy. The list is empty if
    the rank has no output.
    """
    collective = schedule.collective
    op, root, ranks = collective.op, collective.root, range(collective.ranks)
    if op in (Op.ALL_REDUCE, Op.REDUCE):
        total = np.sum([inputs[r][0] for r in ranks], axis=0)
        return [total] if op is Op.ALL_REDUCE or rank == root else []
    if op is Op.REDUCE_SCATTER:
        return [np.sum([inputs[r][rank] for r in ranks], axis=0)]
    if op in (Op.ALL_GATHER, Op.GATHER):
        return [inputs[r][0] for r in ranks] if op is Op.ALL_GATHER or rank == root else []
    if op is Op.ALL_TO_ALL:
        return [inputs[r][rank] for r in ranks]
    if op.scans:
        before = rank + (op is Op.SCAN)
        return [np.sum([inputs[r][0] for r in ranks[:before]], axis=0)] if before else []
    assert op in (Op.BROADCAST, Op.SCATTER) and root is not None
    return [inputs[root][0 if op is Op.BROADCAST else rank]]


def run_and_compare(op: Op | str, name: str, ranks: int) -> None:
    schedule = build(op, name, ranks=ranks, root=ranks // 2)
    inputs = inputs_of(schedule)
    outputs = [
        [np.zeros(LENGTH, np.int64) for _ in range(schedule.collective.output_pieces(rank))]
        for rank in range(ranks)
    ]
    reference.run(
        lower(schedule),
        [[piece.copy().view(np.uint8) for piece in pieces] for pieces in inputs],
        [[piece.view(np.uint8) for piece in pieces] for pieces in outputs],
        DType.INT64,
        ReduceOp.SUM,
        block_bytes=64,
    )
    for rank in range(ranks):
        for piece, want in enumerate(expected(schedule, inputs, rank)):
            assert outputs[rank][piece].tolist() == want.tolist(), f"rank {rank}, piece {piece}"


EVERY = [(op, name) for op in Op if op is not Op.BARRIER for name in names(op)]


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_computes_the_same_as_numpy(op: Op, name: str) -> None:
    for ranks in (5, 6, 8, 9, 16):  # tests/execution covers the other numbers of ranks
        with turn(ranks=ranks):
            run_and_compare(op, name, ranks)


@pytest.mark.parametrize(("op", "name", "ranks"), WITH_PARAMETERS)
def test_algorithms_with_parameters_compute_the_same_as_numpy(
    op: str, name: str, ranks: int
) -> None:
    run_and_compare(op, name, ranks)


WRITTEN = [
    "ring:channels=2",
    "bucket:4x2",
    "torus_rings:4x2",
    "swing:2x4",
    "double_binary_tree:3",
    "reduce_broadcast:reduce=k_nomial:3,broadcast=chain",
    "level0:mesh@4;level1:halving_doubling",
    "level0:binomial_tree@2;level1:bruck@2;level2:NHR@2",
]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_names_its_algorithm_with_parameters(
    name: str, threads: Callable[[int], Threads]
) -> None:
    def body(comm: Communicator) -> Any:
        x = np.arange(5000, dtype=np.float32) * (comm.rank + 1)
        comm.all_reduce(x, algorithm=name)
        return x

    want = np.arange(5000, dtype=np.float32) * 36
    for x in threads(8).run(body):
        assert np.array_equal(x, want)
