"""Positions in the streams of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.peer_device import SideStream
from unisono.torch_backend.private import current_stream_handle, hide_from_dynamo

# torch gives these classes no types.
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


class CudaStream:
    """The streams of this process on a CUDA device; see `PeerDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = int(device.index)
        self._side: dict[SideStream, Any] = {}
        self._is_alone = torch.cuda.device_count() == 1
        self._nothing = nullcontext()

    def mark(self) -> Any:
        """Records an event of this process on the current stream."""
        event = _Event()
        event.record(self._stream())
        return event

    def wait_mark(self, mark: Any) -> None:
        """Makes the current stream wait for an event of this process; None needs no wait."""
        if mark is not None:
            self._stream().wait_event(mark)

    def has_passed(self, mark: Any) -> bool:
        """Returns True if the device has reached an event."""
        return mark is None or bool(mark.query())

    def synchronize(self, mark: Any) -> None:
        """Blocks the host until the device has reached an event."""
        mark.synchronize()

    def enqueue(self, work: Callable[[], object]) -> None:
        """Calls `work`, whose operations torch enqueues."""
        work()

    def keep(self, tensors: object) -> None:
        """Does nothing, since torch gives memory to later work of the same stream only."""

    def selected(self) -> AbstractContextManager[None]:
        """Returns a context in which this device is torch's current device."""
        if self._is_alone:
            return self._nothing
        found: AbstractContextManager[None] = torch.cuda.device(self._device)
        return found

    @contextmanager
    def on_side_stream(self, stream: SideStream = SideStream.CALLS) -> Iterator[None]:
        """Returns a context with a stream for communication."""
        torch.cuda.set_device(self._device)
        if stream not in self._side:
            self._side[stream] = _Stream(self._device)
        with torch.cuda.stream(self._side[stream]):
            yield

    def staging(self, nbytes: int) -> torch.Tensor:
        """Returns pinned host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def require_here(self, tensor: torch.Tensor) -> None:
        """Raises `UnsupportedError` for a tensor of another device."""
        if tensor.get_device() != self._index:
            raise UnsupportedError(
                f"expected a tensor on {self._device}, the device of this rank's group, not on "
                f"{tensor.device}: call torch.cuda.set_device before init_process_group"
            )

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _handle(self) -> int:
        """Returns the handle of the current stream."""
        return current_stream_handle(self._index)


hide_from_dynamo(CudaStream)
