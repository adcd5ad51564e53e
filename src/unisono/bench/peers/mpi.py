"""Driver of MPI through mpi4py's buffer interface. The launcher determines the MPI library.

mpi4py initialises MPI on import and finalises it at exit. Buffers are passed with their type, which
saves about 0.1 us per call, so that MPI is measured at its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from unisono.bench.cases import LOGICAL, Case
from unisono.bench.peers.base import Array, Call, Peer, Puts, Repeat
from unisono.bench.peers.pairs import begin_each, bind_messages
from unisono.errors import UnsupportedError

_REDUCE_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
    "minloc": MPI.MINLOC,
    "maxloc": MPI.MAXLOC,
}
_TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
    "int16": MPI.INT16_T,
    "uint16": MPI.UINT16_T,
    "int32": MPI.INT32_T,
    "uint32": MPI.UINT32_T,
    "int64": MPI.INT64_T,
    "uint64": MPI.UINT64_T,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
    "bool": MPI.C_BOOL,
    # Pairs with an index of 8 bytes are missing, because MPI's indices have 4 bytes.
    "float32_int32": MPI.FLOAT_INT,
    "int32_int32": MPI.INT_INT,
}


class MpiPeer(Peer):
    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank

    def puts(self, case: Case, x: Array, out: Array) -> Puts:
        return MpiPuts(case, x, out)

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        if case.operation.uneven:
            return self._bind_uneven(case, x, out)
        source, target = _message(case, x), _message(case, out)
        if case.operation.reduces:
            return self._bind_reduction(case, source, target)
        comm, root, rank = self._comm, case.root, self.rank
        match case.op:
            case "all_gather":
                return partial(comm.Allgather, source, target)
            case "all_to_all":
                return partial(comm.Alltoall, source, target)
            case "broadcast":
                return partial(comm.Bcast, source, root)
            case "gather":
                return partial(comm.Gather, source, target if rank == root else None, root)
            case "scatter":
                return partial(comm.Scatter, source if rank == root else None, target, root)
            case "send_recv":
                right, left = (rank + 1) % case.ranks, (rank - 1) % case.ranks
                return partial(comm.Sendrecv, source, right, 0, target, left, 0)
            case "barrier":
                return partial(comm.Barrier)
        raise UnsupportedError(f"MPI has no {case.op}")

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        comm = self._comm
        return bind_messages(
            case,
            self.rank,
            x,
            out,
            message=partial(_message, case),
            send=comm.Send,
            recv=comm.Recv,
            isend=partial(begin_each, comm.Isend),
            irecv=partial(begin_each, comm.Irecv),
            finish=MPI.Request.Waitall,
        )

    def _bind_reduction(self, case: Case, source: Any, target: Any) -> Call:
        _require_reduction(case)
        comm, reduction, root = self._comm, _REDUCE_OPS[case.redop], case.root
        match case.op:
            case "all_reduce":
                return partial(comm.Allreduce, MPI.IN_PLACE, source, reduction)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, source, target, reduction)
            case "scan":
                return partial(comm.Scan, MPI.IN_PLACE, source, reduction)
            case "exscan":
                return partial(comm.Exscan, MPI.IN_PLACE, source, reduction)
            case "reduce" if self.rank == root:
                return partial(comm.Reduce, MPI.IN_PLACE, source, reduction, root)
            case "reduce":
                return partial(comm.Reduce, source, None, reduction, root)
        raise UnsupportedError(f"MPI has no {case.op}")

    def _bind_uneven(self, case: Case, x: Array, out: Array) -> Call:
        comm, root, rank = self._comm, case.root, self.rank
        source, target = _message(case, x), _message(case, out)
        match case.op:
            case "all_gather_v":
                return partial(comm.Allgatherv, source, _pieces(case, out, case.shares))
            case "reduce_scatter_v":
                _require_reduction(case)
                reduction, shares = _REDUCE_OPS[case.redop], list(case.shares)
                return partial(comm.Reduce_scatter, source, target, shares, reduction)
            case "all_to_all_v":
                own = case.lengths(rank)
                return partial(comm.Alltoallv, _pieces(case, x, own), _pieces(case, out, own))
            case "gather_v":
                pieces = _pieces(case, out, case.shares) if rank == root else None
                return partial(comm.Gatherv, source, pieces, root)
            case "scatter_v":
                pieces = _pieces(case, x, case.shares) if rank == root else None
                return partial(comm.Scatterv, pieces, target, root)
        raise UnsupportedError(f"MPI has no {case.op}")


class MpiPuts(Puts):
    """Puts by `Put`, with a flush each time."""

    def __init__(self, case: Case, x: Array, out: Array) -> None:
        comm = MPI.COMM_WORLD
        self._source, self._out = _message(case, x), out
        self._window = MPI.Win.Allocate(max(1, out.nbytes), 1, comm=comm)
        self._window.Lock_all()
        self._right = (comm.rank + 1) % comm.size

    def __call__(self, times: int) -> None:
        put, flush, source, right = self._window.Put, self._window.Flush, self._source, self._right
        for _ in range(times):
            put(source, right)
            flush(right)
        MPI.COMM_WORLD.Barrier()

    def store(self) -> None:
        self._window.Sync()
        memory = self._window.tomemory()[: self._out.nbytes]
        self._out.view(np.uint8)[...] = np.asarray(memory)

    def close(self) -> None:
        self._window.Unlock_all()
        self._window.Free()


def _require_reduction(case: Case) -> None:
    """Raises UnsupportedError for reductions that MPI does not have."""
    known = case.dtype in _TYPES and case.redop in _REDUCE_OPS
    if not known or (case.dtype == "bool" and case.redop not in LOGICAL):
        raise UnsupportedError(f"MPI has no {case.redop} of {case.dtype}")


def _message(case: Case, array: Array) -> list[Any]:
    """Returns an array as a message for mpi4py. Types that MPI does not have are sent as bytes."""
    return [array.view(np.uint8), _TYPES.get(case.dtype, MPI.BYTE)]


def _pieces(case: Case, array: Array, lengths: Sequence[int]) -> list[Any]:
    """Returns an array as a message for mpi4py, with one piece per rank."""
    data, kind = _message(case, array)
    unit = 1 if case.dtype in _TYPES else case.storage.itemsize
    return [data, [length * unit for length in lengths], kind]
