"""Base class of the process group, with its communicator and the `Work` objects of its calls."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from unisono import config
from unisono.errors import CommunicationError
from unisono.torch_backend import flight_recorder
from unisono.torch_backend.call_tracing import TracedCommunicator
from unisono.torch_backend.convert import seconds
from unisono.torch_backend.heap_tensor import heap_tensor
from unisono.torch_backend.history import History
from unisono.torch_backend.missing_methods import DeviceBackend
from unisono.torch_backend.named_group import NamedGroup
from unisono.torch_backend.pending_work import DONE, CombinedHandle, Completer, pending
from unisono.torch_backend.private import (
    WorkBase,
    attach_placeholder,
    hide_from_dynamo,
    is_profiling,
    serve_device,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta


class GroupBase(NamedGroup):
    """A process group with one communicator.

    Calls go to `_comm`: the communicator, or the object that replaces it while calls are traced or
    coalesced.
    """

    def __init__(self, comm: Any, store: Any = None, global_ranks: list[int] | None = None) -> None:
        super().__init__(comm.rank, comm.size)
        self.communicator = comm
        self.store = store
        self.global_ranks = global_ranks or list(range(comm.size))
        recorded = config.flight_recorder().calls
        self.history = History(recorded) if recorded else None
        self._sequence = 0
        self._splits = 0
        self._is_profiled = False
        self._comm: Any = self._comm_to_call()
        self._completer = Completer()
        # Runs at shutdown, or at the end of the interpreter.
        self._leave = weakref.finalize(self, _leave, comm, self._completer, self.history)
        self._placeholder = attach_placeholder(self, comm.rank, comm.size)
        self._own_backend = DeviceBackend(
            self._placeholder, lambda count, dtype: heap_tensor(comm, (count,), dtype)
        )
        self.own_devices = ["cpu"]
        self.row_exchange: Any = None
        """The group's `RowExchange`; None before `row_exchange_of` makes it."""

    def serve(self, device: str) -> None:
        """Serves the tensors of another device."""
        self.own_devices.append(device)
        serve_device(self, device, self._placeholder)

    def _begin(self) -> None:
        """Counts a call at its start. Starts or stops tracing when torch's profiler starts or
        stops.
        """
        self._sequence += 1
        if is_profiling() is not self._is_profiled:
            self._change_tracing()

    def _change_tracing(self) -> None:
        # while calls are coalesced, `_comm` is their recorder and must not change
        if self._comm is self.communicator or isinstance(self._comm, TracedCommunicator):
            self._is_profiled = not self._is_profiled
            self._comm = self._comm_to_call()

    def _comm_to_call(self) -> Any:
        if self._is_profiled or self.history is not None:
            return TracedCommunicator(
                self.communicator, self.history, spans_of_gloo=self._stands_in
            )
        return self.communicator

    def stand_in(self) -> None:
        """Makes the group answer to the name gloo, also in the names of the profiler's spans."""
        super().stand_in()
        self._comm = self._comm_to_call()

    def _as_one(self, name: str, read: list[torch.Tensor], issue: Callable[[], Any]) -> Any:
        """Returns `issue()`, which makes several calls where Gloo makes one named `name`."""
        if isinstance(self._comm, TracedCommunicator):
            return self._comm.as_one(name, read, issue)
        return issue()

    def _pending(self, handle: Any, tensors: list[torch.Tensor]) -> WorkBase:
        return pending(handle, tensors, self._completer)

    @contextmanager
    def _within(self, timeout: timedelta | float | None) -> Iterator[None]:
        """Sets the timeout of the calls inside the block; None keeps the group's timeout."""
        limit_s = seconds(timeout)
        if limit_s is None:
            yield
            return
        comm = self.communicator
        usual_s, comm.timeout_s = comm.timeout_s, limit_s
        try:
            yield
        finally:
            comm.timeout_s = usual_s

    def _in_order(
        self,
        name: str,
        calls: Sequence[Callable[..., Any]],
        read: list[torch.Tensor],
        results: list[torch.Tensor],
        later: bool,
    ) -> WorkBase:
        """Issues several calls named `name` in order and returns one work for all of them. Each
        call takes `async_op`.
        """

        def issue() -> CombinedHandle:
            handles = [call(async_op=later) for call in calls]
            return CombinedHandle(handles if later else [])

        handle = self._as_one(name, read, issue)
        return self._pending(handle, results) if later else DONE


def as_one_call(
    group: GroupBase, name: str, read: list[torch.Tensor], issue: Callable[[], Any]
) -> Any:
    """Counts and traces `issue()` as one call named `name` of a group, and returns its result.
    `issue` moves data by other means than one collective, such as by puts.
    """
    group._begin()
    return group._as_one(name, read, issue)


def _leave(comm: Any, completer: Completer, history: History | None) -> None:
    if history is not None and history.is_pending:
        flight_recorder.dump_at_end()
    # Close a failed group without an error: the failed call has already raised it.
    with suppress(CommunicationError):
        comm.close()
    completer.close()


hide_from_dynamo(GroupBase)
