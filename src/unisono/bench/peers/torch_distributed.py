"""Driver of torch.distributed with any backend, such as Gloo or Unisono."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.bench.cases import BIT_PATTERNS, PAIRS, Case
from unisono.bench.peers.base import Array, Call, Peer, Repeat
from unisono.bench.peers.cuda_devices import select_gpu
from unisono.bench.peers.pairs import begin_each, bind_messages, wait_each
from unisono.errors import UnsupportedError
from unisono.torch_backend import all_gather_single, reduce_scatter_single

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

_EQUAL_ONLY = ("gather_v", "scatter_v")
_EQUAL_ONLY_IN_GLOO = ("all_gather_v", "reduce_scatter_v")


class TorchPeer(Peer):
    def __init__(
        self, *, backend: str, rank: int, ranks: int, rendezvous: str, device: str = ""
    ) -> None:
        """`device`: that of the tensors, whose content is copied from and to the arrays. By
        default, the tensors have the memory of the arrays."""
        self.rank = rank
        self._backend, self._device = backend, device
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        torch.set_num_threads(1)
        if device == "cuda":
            select_gpu(rank)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        if case.dtype in PAIRS:
            raise UnsupportedError(f"torch has no {case.dtype}")
        if case.operation.reduces and case.redop not in _REDUCE_OPS:
            raise UnsupportedError(f"torch.distributed has no {case.redop}")
        if case.op in _EQUAL_ONLY or (self._backend == "gloo" and case.op in _EQUAL_ONLY_IN_GLOO):
            base = case.op.removesuffix("_v")
            raise UnsupportedError(f"{base} of {self._backend} needs pieces of equal length")
        self._copies = []
        return _bind(case, self.rank, self._tensor(case, x), self._tensor(case, out))

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        if case.dtype in PAIRS:
            raise UnsupportedError(f"torch has no {case.dtype}")
        if self._device == "cuda" and self._backend == "gloo":
            raise UnsupportedError("gloo has no messages between CUDA tensors")
        self._copies = []
        return bind_messages(
            case,
            self.rank,
            x,
            out,
            message=partial(self._tensor, case),
            send=dist.send,
            recv=dist.recv,
            isend=partial(begin_each, dist.isend),
            irecv=partial(begin_each, dist.irecv),
            finish=wait_each,
        )

    def load(self) -> None:
        for array, tensor in self._copies:
            tensor.copy_(array)

    def store(self) -> None:
        for array, tensor in self._copies:
            array.copy_(tensor)

    def finish(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        dist.destroy_process_group()

    def _tensor(self, case: Case, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if case.dtype in BIT_PATTERNS:
            tensor = tensor.view(getattr(torch, case.dtype))
        if not self._device:
            return tensor
        copy = torch.empty_like(tensor, device=self._device)
        self._copies.append((tensor, copy))
        return copy


def _bind(case: Case, rank: int, x: torch.Tensor, out: torch.Tensor) -> Call:
    reduction, root = _REDUCE_OPS.get(case.redop), case.root
    at_root = rank == root
    match case.op:
        case "all_reduce":
            return partial(dist.all_reduce, x, reduction)
        case "reduce_scatter":
            return partial(reduce_scatter_single, out, x, reduction)
        case "all_gather":
            return partial(all_gather_single, out, x)
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
        case "all_gather_v":
            return partial(dist.all_gather, _pieces(out, case), x)
        case "reduce_scatter_v":
            return partial(dist.reduce_scatter, out, _pieces(x, case), reduction)
        case "all_to_all_v":
            own = list(case.lengths(rank))
            return partial(dist.all_to_all_single, out, x, own, own)
        case "send_recv":
            return partial(_shift, x, out, rank, case.ranks)
        case "barrier":
            return dist.barrier
    raise UnsupportedError(f"torch.distributed has no {case.op}")


def _pieces(tensor: torch.Tensor, case: Case) -> list[torch.Tensor]:
    return list(torch.split(tensor, list(case.shares)))


def _shift(x: torch.Tensor, out: torch.Tensor, rank: int, ranks: int) -> None:
    work = dist.isend(x, (rank + 1) % ranks)
    dist.recv(out, (rank - 1) % ranks)
    if work is not None:
        work.wait()
