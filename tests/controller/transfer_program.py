"""A program of all ranks that checks the requirements of every transfer.

`torchrun ... transfer_program.py ProcessGroupTransfer`, `mpiexec ... MpiTransfer`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unisono
from unisono.communicator import Communicator
from unisono.controller import Controller, Job, Transfer

Kind = Callable[[Any], Any]
"""Makes the array of a transfer from a NumPy array: NumPy's own, or a tensor."""


def check_transfer(transfer: Transfer, rank: int, size: int, kind: Kind) -> None:
    """Checks all operations of a transfer, with arrays of one kind."""
    _check_reductions(transfer, rank, size, kind)
    _check_moves(transfer, rank, size, kind)
    _check_votes(transfer, rank, size, kind)


def _check_reductions(transfer: Transfer, rank: int, size: int, kind: Kind) -> None:
    total = sum(range(size))
    expected = {"sum": total, "max": size - 1, "min": 0, "avg": total / size}
    for op, value in expected.items():
        arrays = tuple(kind(np.full(shape, rank, np.float32)) for shape in ((3,), (2, 2), ()))
        transfer.begin(Job(operation="all_reduce", arrays=arrays, op=op)).wait(20)
        for array in arrays:
            assert np.allclose(np.asarray(array), value), (op, array)
    strided = kind(np.zeros((4, 6), np.int64))[:, ::2]
    strided[...] = rank
    transfer.begin(Job(operation="all_reduce", arrays=(strided,))).wait(20)
    assert (np.asarray(strided) == total).all()
    rows = kind(np.arange(size * 2.0) + rank)
    share = transfer.begin(Job(operation="reduce_scatter", arrays=(rows,))).wait(20)
    at = 2 * rank
    assert np.asarray(share).tolist() == [size * at + total, size * (at + 1) + total]


def _check_moves(transfer: Transfer, rank: int, size: int, kind: Kind) -> None:
    values = kind(np.full((2, 3), rank))
    transfer.begin(Job(operation="broadcast", arrays=(values,), root=size - 1)).wait(20)
    assert (np.asarray(values) == size - 1).all()
    even = transfer.begin(Job(operation="all_gather", arrays=(kind(np.full((2, 3), rank)),)))
    assert np.asarray(even.wait(20)).tolist() == [[r] * 3 for r in range(size) for _ in "12"]
    lengths = tuple(range(size))  # rank 0 contributes no rows
    mine = kind(np.full((rank, 2), rank))
    rows = transfer.begin(Job(operation="all_gather", arrays=(mine,), lengths=lengths)).wait(20)
    assert np.asarray(rows).tolist() == [[r] * 2 for r in range(size) for _ in range(r)]
    shares = kind(np.arange(size) + 10 * rank)
    received = transfer.begin(Job(operation="all_to_all", arrays=(shares,))).wait(20)
    assert np.asarray(received).tolist() == [rank + 10 * r for r in range(size)]


def _check_votes(transfer: Transfer, rank: int, size: int, kind: Kind) -> None:
    """Begins voted jobs in the same order on all ranks before any job ends. For every second job,
    one rank is not ready, so this job must change no array.
    """
    arrays = [kind(np.full(5, rank)) for _ in range(8)]
    pending = []
    for index, array in enumerate(arrays):
        lacks = index % 2 == 1 and rank == index % size
        job = Job(operation="all_reduce", arrays=(array,))
        voted = transfer.prepare(job)
        vote = voted.begin_void() if lacks else voted.begin((array,))
        pending.append(vote)
    for index, (vote, array) in enumerate(zip(pending, arrays, strict=True)):
        vote.wait(20)
        assert vote.is_completed()
        assert vote.ran == (index % 2 == 0)
        assert (np.asarray(array) == (sum(range(size)) if vote.ran else rank)).all()


def check_controller(comm: Communicator, transfer: Transfer, kind: Kind) -> None:
    """Checks a controller: submissions in any order, fusion, a frozen plan, and an error after
    which it stays usable.
    """
    n, total = comm.size, sum(range(comm.size))
    with Controller(comm, transfer=transfer) as controller:
        for step in range(10):
            arrays = {f"t{i}": kind(np.full(i + 1, float(comm.rank))) for i in range(12)}
            order = np.random.default_rng([step, comm.rank]).permutation(12)
            handles = [controller.all_reduce(f"t{i}", arrays[f"t{i}"]) for i in order]
            for handle in handles:
                assert (np.asarray(handle.wait(20)) == total).all()
        assert controller.stats().cache_hits >= 4 * 12
        rows = controller.all_gather("rows", kind(np.full(comm.rank, comm.rank)))
        assert np.asarray(rows.wait(20)).tolist() == [r for r in range(n) for _ in range(r)]
        with pytest.raises(unisono.MismatchError):
            controller.all_reduce("wrong", kind(np.zeros(1 + comm.rank))).wait(20)
        assert (np.asarray(controller.all_reduce("t0", kind(np.ones(1))).wait(20)) == n).all()


def main(name: str) -> None:
    kinds: list[Kind] = [lambda array: array]
    with unisono.init() as comm:
        if name == "ProcessGroupTransfer":
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            kinds.append(torch.from_numpy)
        made: Callable[[], Transfer] = getattr(unisono.controller, name)
        for kind in kinds:
            transfer = made()
            check_transfer(transfer, comm.rank, comm.size, kind)
            transfer.close()
            check_controller(comm, made(), kind)
        if name == "ProcessGroupTransfer":
            dist.destroy_process_group()  # otherwise a thread of Gloo aborts at exit
        print(f"rank {comm.rank} is done")


if __name__ == "__main__":
    main(sys.argv[1])
