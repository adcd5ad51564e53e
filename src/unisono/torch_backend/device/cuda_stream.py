"""Positions in the streams of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono.torch_backend.private import hide_from_dynamo

# torch gives these classes no types.
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


class CudaStream:
    """The streams of this process on a CUDA device; see `PeerDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = None

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

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Returns a context with the stream for communication."""
        torch.cuda.set_device(self._device)
        if self._side is None:
            self._side = _Stream(self._device)
        with torch.cuda.stream(self._side):
            yield

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


hide_from_dynamo(CudaStream)
