"""The collectives of `Communicator` for device tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unisono.communicator import dtype_of
from unisono.errors import UnsupportedError
from unisono.torch_backend.convert import NATIVE_DTYPES
from unisono.torch_backend.device.call_header import DeviceRequest, barrier_request
from unisono.torch_backend.device.call_queue import CallQueue, DeviceCall
from unisono.torch_backend.device.flat_tensors import Flat, flat_source, flat_target, overlap
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, Op, ReduceOp


class DeviceCommunicator:
    """Collectives and messages on tensors of one device for each rank.

    A blocking call returns when all ranks have made it and its work is enqueued on the current
    stream; the host does not wait for the device.
    """

    def __init__(
        self, comm: Any, device: Any, path: Any, messages: Any, host_memory_reason: str = ""
    ) -> None:
        """`comm`: a communicator of its own in host memory. `path` and `messages` move the data of
        collectives and messages: `PeerMemory` and `DeviceMessages`, or `HostMemory`."""
        self.host, self.device, self._path, self._messages = comm, device, path, messages
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.host_memory_reason = host_memory_reason
        """The reason for host memory; empty if data does not go through it."""
        self._queue = CallQueue(device)
        self._dtypes: dict[tuple[Op, torch.dtype, ReduceOp], DType] = {}

    hosts = property(lambda self: self.host.hosts)
    reproducible = property(lambda self: self.host.reproducible)

    @property
    def timeout_s(self) -> float:
        """The timeout of calls, in seconds."""
        return float(self.host.timeout_s)

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.host.timeout_s = timeout_s

    def all_reduce(self, x: torch.Tensor, op: ReduceOp, *, async_op: bool = False) -> Any:
        """Reduces a tensor over all ranks, in place."""
        return self._in_place(Op.ALL_REDUCE, x, None, op, async_op)

    def reduce(self, x: torch.Tensor, root: int, op: ReduceOp, *, async_op: bool = False) -> Any:
        """Reduces a tensor over all ranks, in place on the root."""
        return self._in_place(Op.REDUCE, x, root, op, async_op)

    def broadcast(self, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        """Copies the root's tensor to every other rank."""
        return self._in_place(Op.BROADCAST, x, root, ReduceOp.SUM, async_op)

    def all_gather(self, source: Any, target: Any, *, async_op: bool = False) -> Any:
        """Gathers every rank's tensor in one tensor or in a list."""
        return self._move(Op.ALL_GATHER, source, target, async_op, targets=self.size)

    def reduce_scatter(
        self, source: Any, target: Any, op: ReduceOp, *, async_op: bool = False
    ) -> Any:
        """Reduces a tensor or a list over all ranks; rank r gets piece r."""
        return self._move(
            Op.REDUCE_SCATTER, source, target, async_op, sources=self.size, reduction=op
        )

    def all_to_all(self, source: Any, target: Any, *, async_op: bool = False) -> Any:
        """Sends piece r to rank r, and receives a piece from each rank."""
        return self._move(
            Op.ALL_TO_ALL, source, target, async_op, sources=self.size, targets=self.size
        )

    def all_to_all_v(
        self,
        source: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        target: torch.Tensor,
        *,
        async_op: bool = False,
    ) -> Any:
        """Sends the first `send_counts[0]` elements of a flat tensor to rank 0, the next to rank 1,
        and so on, and receives `recv_counts[r]` elements from each rank r.
        """
        sources, targets = torch.split(source, send_counts), torch.split(target, recv_counts)
        return self.all_to_all(list(sources), list(targets), async_op=async_op)

    def gather(self, source: Any, target: Any, root: int, *, async_op: bool = False) -> Any:
        """Gathers every rank's tensor at the root."""
        return self._move(Op.GATHER, source, target, async_op, targets=self.size, root=root)

    def scatter(self, source: Any, target: Any, root: int, *, async_op: bool = False) -> Any:
        """Sends piece r of the root to rank r."""
        return self._move(Op.SCATTER, source, target, async_op, sources=self.size, root=root)

    def explain(self) -> str:
        """Returns in which way the data of this group's calls moves, and why."""
        if self.host_memory_reason:
            return f"through host memory, since {self.host_memory_reason}"
        performers = len(set(self.device.performers))
        return (
            f"between the device memories of one host, moved by {performers} of {self.size} ranks"
        )

    def barrier(self, *, async_op: bool = False) -> Any:
        """Waits until every rank has called `barrier` and its device has ended its earlier work."""
        self.device.synchronize(self.device.mark())
        return self._call(barrier_request(), None, None, None, async_op)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Sends a tensor to a rank."""
        return self._message(self._messages.send(x.detach().contiguous(), dst, tag), async_op)

    def recv(
        self, x: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False
    ) -> Any:
        """Receives a tensor from a rank, or from any rank."""
        flat = flat_target(x)
        call = self._messages.recv(flat.tensor, src, tag, flat.finish, async_op)
        return self._message(call, async_op)

    def group(self, ranks: Sequence[int]) -> Any:
        """Returns the communicator in host memory of some ranks, or None; see `Communicator`."""
        return self._queue.run(lambda: self.host.group(ranks))

    def refuse(self, name: str, error: Exception) -> None:
        """Tells the other ranks that this rank raises an error and does not make its next call."""
        self._queue.run(lambda: self.host.refuse(name, error))

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends all pending calls on all ranks with `AbortedError`."""
        self.host.abort(reason)

    def close(self) -> None:
        """Leaves the group."""
        self._queue.close()
        self._path.close()
        self.host.close()

    def _message(self, call: DeviceCall, async_op: bool) -> Any:
        if async_op:
            return call
        call.wait()
        return call.source_rank()

    def _in_place(
        self, op: Op, x: torch.Tensor, root: int | None, reduction: ReduceOp, async_op: bool
    ) -> Any:
        try:
            dtype = self._dtype(op, x, reduction)
            flat = flat_target(x, keeps_values=True)
        except (ValueError, TypeError) as error:
            self.refuse(op.value, error)
            raise
        source = target = flat.tensor
        inputs = outputs = flat.sizes
        if op is Op.REDUCE and self.rank != root:
            target, outputs = None, ()
        elif op is Op.BROADCAST and self.rank != root:
            source, inputs = None, ()
        request = DeviceRequest(op, dtype, reduction, root, inputs, outputs)
        return self._call(request, source, target, flat.finish, async_op)

    def _move(
        self,
        op: Op,
        source: Any,
        target: Any,
        async_op: bool,
        *,
        sources: int = 1,
        targets: int = 1,
        root: int | None = None,
        reduction: ReduceOp = ReduceOp.SUM,
    ) -> Any:
        try:
            sends = op is not Op.SCATTER or self.rank == root
            receives = op is not Op.GATHER or self.rank == root
            first = source if isinstance(source, torch.Tensor) else (source or [target])[0]
            dtype = self._dtype(op, first, reduction)
            ours = flat_source(source, sources) if sends else Flat()
            theirs = flat_target(target, pieces=targets) if receives else Flat()
            _require_pieces(ours, sources if sends else 0, "input")
            _require_pieces(theirs, targets if receives else 0, "output")
        except (ValueError, TypeError) as error:
            self.refuse(op.value, error)
            raise
        if op is Op.ALL_TO_ALL and overlap(ours.tensor, theirs.tensor):
            ours = ours._replace(tensor=ours.tensor.clone())  # type: ignore[union-attr]
        request = DeviceRequest(op, dtype, reduction, root, ours.sizes, theirs.sizes)
        return self._call(request, ours.tensor, theirs.tensor, theirs.finish, async_op)

    def _call(
        self,
        request: DeviceRequest,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        finish: Callable[[], None] | None,
        async_op: bool,
    ) -> Any:
        job = partial(self._path.run, request, source, target)
        if async_op:
            return self._queue.begin(job, finish)
        self._queue.run(job)
        if finish is not None:
            self.device.enqueue(finish)
        return None

    def _dtype(self, op: Op, x: torch.Tensor, reduction: ReduceOp) -> DType:
        found = self._dtypes.get((op, x.dtype, reduction))
        if found is None:
            found = _checked_dtype(op, x, reduction)
            self._dtypes[op, x.dtype, reduction] = found
        return found


def _checked_dtype(op: Op, x: torch.Tensor, reduction: ReduceOp) -> DType:
    """Returns the element type of a call. Raises `UnsupportedError` if it cannot be reduced."""
    if not op.reduces:
        return dtype_of(x) if x.dtype in NATIVE_DTYPES else DType.UINT8
    dtype = dtype_of(x)
    if not dtype.supports(reduction):
        raise UnsupportedError(
            f"{op}: {dtype.name.lower()} elements cannot be reduced by {reduction.name.lower()}"
        )
    return dtype


def _require_pieces(flat: Flat, expected: int, what: str) -> None:
    if len(flat.sizes) != expected:
        raise ValueError(
            f"expected {expected} {what} tensors, one for each rank, not {len(flat.sizes)}"
        )


hide_from_dynamo(DeviceCommunicator)
