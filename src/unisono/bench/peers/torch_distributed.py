"""Any backend of torch.distributed: Gloo, and Unisono behind the same interface."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer
from unisono.errors import UnsupportedError

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class TorchPeer(Peer):
    def __init__(self, *, backend: str, rank: int, ranks: int, meeting: str) -> None:
        self.rank = rank
        torch.set_num_threads(1)
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        return _bind(case, self.rank, _tensor(case, x), _tensor(case, out))

    def close(self) -> None:
        dist.destroy_process_group()


def _tensor(case: Case, array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if case.dtype == "bfloat16" else tensor


def _bind(case: Case, rank: int, x: torch.Tensor, out: torch.Tensor) -> Call:
    reduction, root = _REDUCE_OPS[case.redop], case.root
    at_root = rank == root
    match case.op:
        case "all_reduce":
            return partial(dist.all_reduce, x, reduction)
        case "reduce_scatter":
            return partial(dist.reduce_scatter_tensor, out, x, reduction)
        case "all_gather":
            return partial(dist.all_gather_into_tensor, out, x)
        case "all_to_all":
            return partial(dist.all_to_all_single, out, x)
        case "broadcast":
            return partial(dist.broadcast, x, root)
        case "reduce":
            return partial(dist.reduce, x, root, reduction)
        case "gather":
            return partial(dist.gather, x, _pieces(out, case) if at_root else None, root)
        case "scatter":
            return partial(dist.scatter, out, _pieces(x, case) if at_root else None, root)
        case "send_recv":
            return partial(_shift, x, out, rank, case.ranks)
        case "barrier":
            return dist.barrier
    raise UnsupportedError(f"torch.distributed has no {case.op}")


def _pieces(tensor: torch.Tensor, case: Case) -> list[torch.Tensor]:
    return list(tensor.view(case.ranks, case.piece_count).unbind())


def _shift(x: torch.Tensor, out: torch.Tensor, rank: int, ranks: int) -> None:
    work = dist.isend(x, (rank + 1) % ranks)
    dist.recv(out, (rank - 1) % ranks)
    if work is not None:
        work.wait()
