"""Votes that travel with the data of a small all_reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ranks import Threads
from unisono import Communicator
from unisono.communicator import VotedAllReduce
from unisono.communicator.carried_votes import MOST_BYTES, can_carry, vote_elements
from unisono.types import DType, ReduceOp

World = Callable[[int], Threads]

_CARRYING = [
    (dtype, op)
    for dtype in DType
    for op in ReduceOp
    if dtype.supports(op) and can_carry(dtype, op, 8)
]


def _made(values: np.ndarray, dtype: DType) -> Any:
    """Returns an array of these values. NumPy has no bfloat16, so this is a torch tensor."""
    if dtype is DType.BFLOAT16:
        return torch.from_numpy(values).bfloat16()
    return values.astype(dtype.name.lower())


def _values(array: Any) -> list[float]:
    return array.tolist()  # type: ignore[no-any-return]


def _folded(op: str, every: list[np.ndarray]) -> np.ndarray:
    if op == "avg":
        return np.sum(every, axis=0) / len(every)
    if op in ("band", "bor"):
        fold = {"band": np.bitwise_and, "bor": np.bitwise_or}[op]
        return fold.reduce([each.astype(np.int64) for each in every])
    folds = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    return folds[op].reduce(every)


@pytest.mark.parametrize(
    ("dtype", "reduction"), _CARRYING, ids=[f"{d.name}-{op.name}" for d, op in _CARRYING]
)
def test_a_call_runs_if_and_only_if_no_rank_objects(
    threads: World, dtype: DType, reduction: ReduceOp
) -> None:
    op, lengths = reduction.name.lower(), (3, 1, 5)

    def values(rank: int, length: int) -> np.ndarray:
        return np.arange(length) % 3 + 3.0 * (rank % 2) + 1

    def body(comm: Communicator) -> None:
        first = [_made(values(0, length), dtype) for length in lengths]
        voted = VotedAllReduce(comm, first, op, carries_vote=True)
        for objectors in ((), (0,), (1, 2), (), (0, 1, 2, 3), ()):
            arrays = tuple(_made(values(comm.rank, length), dtype) for length in lengths)
            work = voted.begin_void() if comm.rank in objectors else voted.begin(arrays)
            work.wait()
            assert work.is_completed() and work.ran is (not objectors)
            for array, length in zip(arrays, lengths, strict=True):
                every = [values(rank, length) for rank in range(comm.size)]
                expected = values(comm.rank, length) if objectors else _folded(op, every)
                assert _values(array) == expected.tolist()

    threads(4).run(body)


def test_arrays_that_are_not_contiguous_are_copied(threads: World) -> None:
    def body(comm: Communicator) -> None:
        whole = np.full((4, 3), comm.rank + 1.0)
        voted = VotedAllReduce(comm, [np.zeros(4)], "sum", carries_vote=True)
        for objects, expected in ((True, comm.rank + 1.0), (False, 3.0)):
            column = whole[:, 1]
            work = voted.begin_void() if objects and comm.rank == 1 else voted.begin((column,))
            work.wait()
            assert work.ran is not objects and work.is_completed()
            assert (column == expected).all()
            column[:] = column + 1
            work.wait()
            assert (column == expected + 1).all()
            column[:] = comm.rank + 1.0
            assert (whole[:, ::2] == comm.rank + 1.0).all()
        with pytest.raises(TypeError, match="of the first run"):
            voted.begin((np.zeros(4, np.float32),))

    threads(2).run(body)


def test_a_carried_vote_costs_no_call_of_its_own(threads: World) -> None:
    def body(comm: Communicator) -> None:
        array = np.ones(8, np.float32)
        voted = VotedAllReduce(comm, [array], "sum", carries_vote=True)
        before = comm._engine.group.calls
        voted.begin((array,)).wait()
        assert comm._engine.group.calls == before + 1
        separate = VotedAllReduce(comm, [array], "sum", carries_vote=False)
        separate.begin((array,)).wait()
        assert comm._engine.group.calls == before + 3

    threads(2).run(body)


def test_large_data_and_bytes_carry_no_vote() -> None:
    assert can_carry(DType.FLOAT32, ReduceOp.SUM, MOST_BYTES)
    assert not can_carry(DType.FLOAT32, ReduceOp.SUM, MOST_BYTES + 4)
    # 256 objections would sum to 0, and the average of integers rounds one objection to 0
    assert not can_carry(DType.INT8, ReduceOp.SUM, 8)
    assert not can_carry(DType.INT32, ReduceOp.AVG, 8)
    assert not can_carry(DType.UINT32, ReduceOp.BXOR, 8)
    assert not can_carry(DType.COMPLEX64, ReduceOp.SUM, 8)
    for dtype, op in _CARRYING:
        agreement, objection = vote_elements(dtype, op)
        assert len(agreement) == len(objection) == dtype.size_bytes and agreement != objection
