"""Unisono's own communicator on NumPy arrays."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.peers.base import Array, Call, Peer
from unisono.communicator import Communicator, init
from unisono.errors import UnsupportedError


class NativePeer(Peer):
    """`algorithm` forces one algorithm for every operation."""

    def __init__(
        self, *, rank: int, ranks: int, rendezvous: str, algorithm: str | None = None
    ) -> None:
        self.rank = rank
        self._comm = init(rank=rank, size=ranks, rendezvous=rendezvous)
        self._options = {"algorithm": algorithm} if algorithm else {}

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        return bind(self._comm, case, x, out, **self._options)

    def choose(self, algorithm: str) -> NativePeer:
        self._options = {"algorithm": algorithm}
        return self

    def close(self) -> None:
        self._comm.close()


def bind(comm: Communicator, case: Case, x: Array, out: Array, **options: Any) -> Call:
    """The case's operation on this communicator, as `Peer.bind` wants it."""
    if case.dtype == "bfloat16":
        x, out = _as_bfloat16(x), _as_bfloat16(out)
    operation = case.operation
    if case.op == "barrier":
        return comm.barrier
    if case.op == "send_recv":
        return partial(_shift, comm, x, out)
    arguments: list[Any] = [x] if operation.in_place else [x, out]
    if operation.rooted:
        arguments.append(case.root)
    if operation.reduces:
        arguments.append(case.redop)
    return partial(getattr(comm, case.op), *arguments, **options)


def _shift(comm: Communicator, x: Array, out: Array) -> None:
    work = comm.send(x, (comm.rank + 1) % comm.size, async_op=True)
    comm.recv(out, (comm.rank - 1) % comm.size)
    work.wait()


def _as_bfloat16(bits: Array) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError("bfloat16 needs torch: NumPy has no such type") from error
    return torch.from_numpy(bits).view(torch.bfloat16)
