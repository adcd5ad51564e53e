"""Collectives and messages on device tensors through host memory.

Data is copied from the device to pinned memory, goes through the communicator, and is copied back.
This works for all ranks, also on several hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from unisono.torch_backend.device.call_header import DeviceRequest
from unisono.torch_backend.device.call_queue import DeviceCall
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import Op


class HostMemory:
    """Performs collectives and messages of a group over host memory."""

    def __init__(self, comm: Any, device: Any) -> None:
        """`comm`: a communicator of its own for these calls."""
        self._comm, self._device = comm, device

    def run(
        self,
        request: DeviceRequest,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> None:
        """Performs a collective: the results are enqueued on the current stream."""
        if request.op is Op.BARRIER:
            self._comm.barrier()
            return
        is_in_place = source is not None and source is target
        sent = None if source is None else self._down(source)
        received = sent if is_in_place else None if target is None else self._empty(target)
        _perform(self._comm, request, sent, received)
        if target is not None and received is not None:
            self._up(received, target)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> DeviceCall:
        """Begins a send of the values that `x` has now."""
        call = DeviceCall(self._device)
        work = self._comm.send(self._down(x), dst, tag, async_op=True)
        self._later(call, work.wait)
        return call

    def recv(
        self,
        x: torch.Tensor,
        src: int | None,
        tag: int,
        finish: Callable[[], None] | None,
        later: bool,
    ) -> DeviceCall:
        """Receives into `x`, in this thread, or later in a thread of its own."""
        call, mark = DeviceCall(self._device, finish), self._device.mark()
        received = self._empty(x)
        work = self._comm.recv(received, src, tag, async_op=True)

        def receive() -> int:
            work.wait()
            self._device.wait_mark(mark)
            self._up(received, x)
            return int(work.source_rank())

        if later:
            self._later(call, receive)
        else:
            call.end(None, source=receive())
        return call

    def close(self) -> None:
        """Does nothing, since torch keeps the pinned memory."""

    def _later(self, call: DeviceCall, job: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                with self._device.on_side_stream():
                    source = job()
                    call.end(self._device.mark(), source=-1 if source is None else source)
            except Exception as error:
                call.end(error=error)

        threading.Thread(target=run, name="unisono-device-message", daemon=True).start()

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor in host memory, after the current stream's work."""
        found = self._empty(x)
        self._device.enqueue(lambda: found.copy_(x, non_blocking=True))
        self._device.synchronize(self._device.mark())
        return found

    def _up(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._device.enqueue(lambda: target.copy_(source, non_blocking=True))

    def _empty(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)


def _perform(
    comm: Any, request: DeviceRequest, sent: torch.Tensor | None, received: torch.Tensor | None
) -> None:
    """Calls the communicator with flat tensors cut into the request's pieces."""
    op, root = request.op, request.root
    if op is Op.ALL_REDUCE:
        comm.all_reduce(received, request.reduction)
    elif op is Op.REDUCE:
        comm.reduce(sent if received is None else received, root, request.reduction)
    elif op is Op.BROADCAST:
        comm.broadcast(sent if received is None else received, root)
    elif op is Op.REDUCE_SCATTER:
        comm.reduce_scatter(_pieces(sent, request.inputs), received, request.reduction)
    elif op is Op.ALL_GATHER:
        comm.all_gather(sent, _pieces(received, request.outputs))
    elif op is Op.ALL_TO_ALL:
        comm.all_to_all(_pieces(sent, request.inputs), _pieces(received, request.outputs))
    elif op is Op.GATHER:
        comm.gather(sent, _pieces(received, request.outputs), root)
    else:
        comm.scatter(_pieces(sent, request.inputs), received, root)


def _pieces(flat: torch.Tensor | None, sizes: tuple[int, ...]) -> list[torch.Tensor] | None:
    if flat is None:
        return None
    item = flat.element_size()
    return list(torch.split(flat, [size // item for size in sizes]))


hide_from_dynamo(HostMemory)
