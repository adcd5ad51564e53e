"""The most recent calls of one group, with the fields of torch's flight recorder."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

import torch

from unisono.torch_backend.pending_work import CombinedHandle
from unisono.torch_backend.private import current_stack


class RecordedCall:
    """One call with its arguments and its state. Does not keep tensors alive."""

    __slots__ = (
        "_handles", "ended", "frames", "inputs", "name", "order", "outputs", "peer", "time_ns",
        "written_as_list",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        peer: int | None,
        order: int,
    ) -> None:
        self.name = name
        self.inputs = [(list(tensor.shape), tensor.dtype) for tensor in inputs]
        self.outputs = [(list(tensor.shape), tensor.dtype) for tensor in outputs]
        self.peer = peer
        self.order = order
        self.time_ns = time.time_ns()
        self.frames = current_stack()
        self.ended = False
        self._handles: list[weakref.ref[Any]] = []

    def end_with(self, handle: Any) -> None:
        """Records that the call has returned: it has ended if `handle` is None, else it is
        pending.
        """
        if handle is None:
            self.ended = True
        elif isinstance(handle, CombinedHandle):
            self._handles = [weakref.ref(part) for part in handle.handles]
        else:
            self._handles = [weakref.ref(handle)]

    @property
    def is_completed(self) -> bool:
        """True if the call has ended without an error."""
        if not self.ended and self._handles:
            # The communicator keeps a handle until its call has ended, so a missing handle means an
            # ended call.
            alive = [handle for handle in (ref() for ref in self._handles) if handle is not None]
            self.ended = all(h.is_completed() and h.exception() is None for h in alive)
        return self.ended


class History:
    """A ring buffer of the most recent `size` calls of a group."""

    def __init__(self, size: int) -> None:
        self._entries: deque[RecordedCall] = deque(maxlen=size)
        self._collectives = 0
        self._messages = 0

    def begin(
        self,
        name: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        peer: int | None,
    ) -> RecordedCall:
        """Records a call before it is made. Messages and collectives have separate counters."""
        if name in ("send", "recv"):
            self._messages += 1
            order = self._messages
        else:
            self._collectives += 1
            order = self._collectives
        entry = RecordedCall(name, inputs, outputs, peer, order)
        self._entries.append(entry)
        return entry

    def entries(self) -> list[RecordedCall]:
        """Returns the recorded calls, oldest first."""
        return list(self._entries)

    @property
    def is_pending(self) -> bool:
        """True if a call is pending or has failed."""
        return not all(entry.is_completed for entry in self._entries)
