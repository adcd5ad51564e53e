"""What the parts of the process group share: its communicator and how works are made."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import CommunicationError
from unisono.torch_backend.convert import seconds
from unisono.torch_backend.private import (
    ProcessGroupBase,
    WorkBase,
    attach_placeholder,
    hide_from_dynamo,
)
from unisono.torch_backend.work import DONE, Completer, PendingWork, Together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta


class GroupBase(ProcessGroupBase):  # type: ignore[misc]
    """A process group over one communicator."""

    def __init__(self, comm: Any, store: Any = None) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._store = store
        self._sequence = 0
        self._completer = Completer()
        # Runs at shutdown, or when the interpreter ends without one.
        self._leave = weakref.finalize(self, _leave, comm, self._completer)
        self._placeholder = attach_placeholder(self, comm.rank, comm.size)

    def _pending(self, handle: Any, tensors: list[torch.Tensor]) -> WorkBase:
        return PendingWork(handle, tensors, self._completer)

    @contextmanager
    def _within(self, timeout: timedelta | float | None) -> Iterator[None]:
        """Give the calls issued inside this time limit; None leaves them the group's."""
        limit_s = seconds(timeout)
        if limit_s is None:
            yield
            return
        usual_s, self._comm.timeout_s = self._comm.timeout_s, limit_s
        try:
            yield
        finally:
            self._comm.timeout_s = usual_s

    def _in_order(
        self, calls: Sequence[Callable[..., Any]], tensors: list[torch.Tensor], later: bool
    ) -> WorkBase:
        """Issue several calls in order as one work; each takes `async_op`."""
        self._sequence += 1
        if later:
            return self._pending(Together([call(async_op=True) for call in calls]), tensors)
        for call in calls:
            call(async_op=False)
        return DONE


def _leave(comm: Any, completer: Completer) -> None:
    # A group that has failed is left all the same: the failure was raised where it hit.
    with suppress(CommunicationError):
        comm.close()
    completer.close()


hide_from_dynamo(GroupBase)
