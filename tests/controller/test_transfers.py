"""Checks that every transfer meets the requirements in `transfer_program.py`: communicators, Gloo,
NCCL and MPI.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from controller.transfer_program import check_controller, check_transfer
from ranks import Threads
from unisono import AbortedError, Communicator, UnisonoError, UnsupportedError
from unisono.bench.contestants import mpi_command
from unisono.controller import CommunicatorTransfer, Job
from unisono.controller.transfers.blocking_transfer import BlockingTransfer

PROGRAM = Path(__file__).with_name("transfer_program.py")
RANKS = 3


def run_program(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(RANKS):  # a launcher may mix the output lines of ranks
        assert f"rank {rank} is done" in done.stdout


def test_communicators(threads: Callable[[int], Threads]) -> None:
    def check(comm: Communicator) -> None:
        transfer = CommunicatorTransfer.over(comm)
        check_transfer(transfer, comm.rank, comm.size, lambda array: array)
        transfer.close()
        check_controller(comm, CommunicatorTransfer.over(comm), lambda array: array)

    threads(RANKS).run(check)


@pytest.mark.torch
def test_a_process_group_of_gloo() -> None:
    pytest.importorskip("torch")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    ranks = ["--nproc-per-node", str(RANKS), "--no-python"]
    program = [sys.executable, str(PROGRAM), "ProcessGroupTransfer"]
    run_program([sys.executable, *launcher, *ranks, *program])


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpi(launcher: str) -> None:
    pytest.importorskip("mpi4py")
    program = ["env", "-u", "MPI4PY_RC_THREADS", sys.executable, str(PROGRAM), "MpiTransfer"]
    try:
        run_program(mpi_command(launcher, ranks=RANKS, program=program))
    except LookupError as error:
        pytest.skip(str(error))


class OneRank:
    """Simulated collectives of one rank; `fails` is the error of the next collective."""

    size = 1

    def __init__(self, fails: Exception | None = None) -> None:
        self.fails = fails

    def all_reduce(self, flat: np.ndarray, op: str) -> None:
        if self.fails is not None:
            raise self.fails

    broadcast = all_gather = reduce_scatter = all_to_all = all_reduce

    def close(self) -> None:
        """Does nothing, since no resources are held."""


def test_an_error_of_the_library_is_reported() -> None:
    transfer = BlockingTransfer(OneRank(OSError("connection reset")), OneRank())
    with pytest.raises(UnisonoError, match="the transfer failed: connection reset"):
        transfer.begin(Job(operation="all_reduce", arrays=(np.ones(2),))).wait(5)
    transfer.close()


def test_averages_of_integers_are_refused() -> None:
    class TwoRanks(OneRank):
        size = 2

    transfer = BlockingTransfer(TwoRanks(), TwoRanks())
    with pytest.raises(UnsupportedError, match="avg of int64: this transfer averages floats only"):
        transfer.begin(Job(operation="all_reduce", arrays=(np.array([1]),), op="avg")).wait(5)
    transfer.close()


def test_a_closed_transfer_takes_no_job() -> None:
    transfer = BlockingTransfer(OneRank(), OneRank())
    transfer.close()
    with pytest.raises(AbortedError, match="the transfer is closed"):
        transfer.begin(Job(operation="all_reduce", arrays=(np.ones(2),)))
