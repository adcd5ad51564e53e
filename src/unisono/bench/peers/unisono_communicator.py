"""Driver of Unisono's own communicator, with NumPy arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from unisono.bench.cases import BIT_PATTERNS, Case
from unisono.bench.peers.base import Array, Call, Peer, Puts, Repeat
from unisono.bench.peers.pairs import bind_messages
from unisono.communicator import Communicator, Work, init
from unisono.errors import UnsupportedError


class NativePeer(Peer):
    """Driver of Unisono. With `algorithm`, all operations use this algorithm. With `shared`, the
    arrays of the cases come from `Communicator.empty`."""

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        rendezvous: str,
        algorithm: str | None = None,
        shared: bool = False,
    ) -> None:
        self.rank = rank
        self._comm = init(rank=rank, size=ranks, rendezvous=rendezvous)
        self._options = {"algorithm": algorithm} if algorithm else {}
        self._shared = shared

    def puts(self, case: Case, x: Array, out: Array) -> Puts:
        return NativePuts(self._comm, case, x, out)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        return self._comm.empty(count, dtype) if self._shared else super().empty(count, dtype)

    def bind(self, case: Case, x: Array, out: Array) -> Call:
        return bind(self._comm, case, x, out, **self._options)

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        return exchange(self._comm, case, x, out)

    def choose(self, algorithm: str) -> NativePeer:
        self._options = {"algorithm": algorithm}
        return self

    def close(self) -> None:
        self._comm.close()


class NativePuts(Puts):
    """Puts to a window, with a signal each time."""

    def __init__(self, comm: Communicator, case: Case, x: Array, out: Array) -> None:
        self._x = _from_bits(x, case.dtype) if case.dtype in BIT_PATTERNS else x
        self._out = out
        self._array = comm.empty(out.shape, out.dtype)
        array = _from_bits(self._array, case.dtype) if case.dtype in BIT_PATTERNS else self._array
        self._window = comm.window(array)
        self._right, self._left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def __call__(self, times: int) -> None:
        put, x, right = self._window.put, self._x, self._right
        for _ in range(times):
            put(x, right, signal=True)
        self._window.wait(self._left, times)

    def store(self) -> None:
        self._out[...] = self._array

    def close(self) -> None:
        self._window.close()


def bind(comm: Communicator, case: Case, x: Array, out: Array, **options: Any) -> Call:
    """Returns a function that performs the case's operation once on a communicator; see
    `Peer.bind`."""
    if case.operation.paired:
        return partial(exchange(comm, case, x, out), 1)
    if case.op == "put":
        return partial(_put_once, comm, case, x, out)
    if case.dtype in BIT_PATTERNS:
        x, out = _from_bits(x, case.dtype), _from_bits(out, case.dtype)
    operation = case.operation
    if case.op == "barrier":
        return comm.barrier
    if case.op == "send_recv":
        return partial(_shift, comm, x, out)
    if operation.uneven:
        return partial(getattr(comm, case.op), *_uneven_arguments(comm, case, x, out), **options)
    arguments: list[Any] = [x] if operation.in_place else [x, out]
    if operation.rooted:
        arguments.append(case.root)
    if operation.reduces:
        arguments.append(case.redop)
    return partial(getattr(comm, case.op), *arguments, **options)


def exchange(comm: Communicator, case: Case, x: Array, out: Array) -> Repeat:
    """Returns a function that performs the case's operation, which sends messages between pairs of
    ranks, a given number of times; see `Peer.exchange`."""
    return bind_messages(
        case,
        comm.rank,
        x,
        out,
        message=lambda part: _from_bits(part, case.dtype) if case.dtype in BIT_PATTERNS else part,
        send=comm.send,
        recv=comm.recv,
        isend=partial(_begin_each, comm.send),
        irecv=partial(_begin_each, comm.recv),
        finish=Work.wait_all,
    )


def _begin_each(transfer: Callable[..., Any], messages: Sequence[Any], partner: int) -> list[Any]:
    """Begins all messages like `begin_each`, but with Unisono's argument `async_op=True`. Passing a
    `functools.partial` with this argument to `begin_each` would be slower."""
    return [transfer(message, partner, async_op=True) for message in messages]


def _uneven_arguments(comm: Communicator, case: Case, x: Array, out: Array) -> list[Any]:
    """Returns the arguments of a v-collective. As in MPI, they contain the number of elements of
    every rank. The arguments of an all_to_all_v contain only the numbers that this rank sends and
    receives."""
    shares, own = case.shares, case.lengths(comm.rank)
    match case.op:
        case "all_gather_v":
            return [x, shares, out]
        case "reduce_scatter_v":
            return [x, shares, out, case.redop]
        case "all_to_all_v":
            return [x, own, own, out]
    return [x, shares, case.root, out]


def _put_once(comm: Communicator, case: Case, x: Array, out: Array) -> None:
    puts = NativePuts(comm, case, x, out)
    puts(1)
    puts.store()
    puts.close()


def _shift(comm: Communicator, x: Array, out: Array) -> None:
    work = comm.send(x, (comm.rank + 1) % comm.size, async_op=True)
    comm.recv(out, (comm.rank - 1) % comm.size)
    work.wait()


def _from_bits(bits: Array, dtype: str) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(f"{dtype} needs torch, because NumPy lacks this type") from error
    return torch.from_numpy(bits).view(getattr(torch, dtype))
