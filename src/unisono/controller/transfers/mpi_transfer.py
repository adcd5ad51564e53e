"""A transfer over MPI, with mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.controller.transfers.blocking_transfer import BlockingTransfer
from unisono.controller.transfers.transfer import Array
from unisono.errors import UnsupportedError
from unisono.transport import load_mpi

_OPS = {"sum": "SUM", "prod": "PROD", "product": "PROD", "min": "MIN", "max": "MAX",
        "band": "BAND", "bor": "BOR", "bxor": "BXOR", "land": "LAND", "lor": "LOR",
        "lxor": "LXOR"}  # fmt: skip


class MpiTransfer(BlockingTransfer):
    """Moves a controller's data over two duplicates of an MPI communicator.

    If `comm` is None, the communicator is `MPI.COMM_WORLD`. All its ranks must create the transfer.
    They must be the controller's ranks in the same order. Arrays are NumPy arrays or CPU tensors of
    types that NumPy has.

    Raises `UnsupportedError` if mpi4py is not installed, or if MPI was initialised without
    `MPI.THREAD_MULTIPLE`, because two threads call MPI.
    """

    def __init__(self, comm: Any = None) -> None:
        mpi = load_mpi()
        found = mpi.COMM_WORLD if comm is None else comm
        super().__init__(_MpiCommunicator(mpi, found), _MpiCommunicator(mpi, found))


class _MpiCommunicator:
    """Blocking collectives on a duplicate of a communicator."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm.Dup()

    @property
    def size(self) -> int:
        return int(self._comm.size)

    def all_reduce(self, flat: Array, op: str) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, _numpy(flat), self._op(op))

    def broadcast(self, flat: Array, root: int) -> None:
        self._comm.Bcast(_numpy(flat), root)

    def all_gather(self, array: Array, lengths: Sequence[int]) -> Array:
        mine = _numpy(array)
        row_shape = mine.shape[1:]
        gathered = np.empty((sum(lengths), *row_shape), mine.dtype)
        row = int(np.prod(row_shape))
        self._comm.Allgatherv(mine, [gathered, [length * row for length in lengths]])
        return _like(array, gathered)

    def reduce_scatter(self, array: Array, op: str) -> Array:
        mine = _numpy(array)
        share = np.empty_like(mine[: len(mine) // self.size])
        self._comm.Reduce_scatter_block(mine, share, self._op(op))
        return _like(array, share)

    def all_to_all(self, array: Array) -> Array:
        mine = _numpy(array)
        received = np.empty_like(mine)
        self._comm.Alltoall(mine, received)
        return _like(array, received)

    def close(self) -> None:
        """Keeps the duplicate until MPI ends, because a thread may still be in a collective."""

    def _op(self, op: str) -> Any:
        if op not in _OPS:
            raise UnsupportedError(f"{op}: MPI reduces with {', '.join(_OPS)}")
        return getattr(self._mpi, _OPS[op])


def _numpy(array: Array) -> np.ndarray:
    """Returns the array, or a NumPy view of a tensor's memory."""
    if isinstance(array, np.ndarray):
        return array
    try:
        memory: np.ndarray = array.numpy()
    except TypeError as error:
        raise UnsupportedError(f"{array.dtype}: NumPy and MPI have no such type") from error
    return memory


def _like(array: Array, result: np.ndarray) -> Array:
    if isinstance(array, np.ndarray):
        return result
    import torch

    return torch.from_numpy(result)
