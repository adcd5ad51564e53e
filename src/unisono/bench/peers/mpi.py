"""MPI through mpi4py's buffer interface. Which MPI it is, the launcher decides.

mpi4py initialises MPI on import and finalises it at exit. Buffers are bound with their type, which
spares MPI's users about 0.1 us a call: peers are measured at their best.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer
from unisono.errors import UnsupportedError

_REDUCE_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
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
}


class MpiPeer(Peer):
    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank

    def bind(self, case: Case, x: Array, out: Array) -> Call:
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

    def _bind_reduction(self, case: Case, source: Any, target: Any) -> Call:
        if case.dtype not in _TYPES or case.redop not in _REDUCE_OPS:
            raise UnsupportedError(f"MPI has no {case.redop} of {case.dtype}")
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


def _message(case: Case, array: Array) -> Any:
    """Types that MPI lacks can still be copied, as bytes."""
    if case.dtype in _TYPES:
        return [array, _TYPES[case.dtype]]
    return [array.view(np.uint8), MPI.BYTE]
