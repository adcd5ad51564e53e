"""Process groups with tensors on several devices. Unisono serves the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.batched import Batched
from unisono.torch_backend.other_devices import OtherBackends
from unisono.torch_backend.own_cuda import OwnCuda
from unisono.torch_backend.private import WorkBase, hide_from_dynamo, name_group
from unisono.torch_backend.process_group import ProcessGroup

_MESSAGES = ("send", "recv", "recv_anysource")
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)
ROUTED = (*_MESSAGES, *_COLLECTIVES)
"""The methods that take tensors, and so are routed by device."""


class MixedGroup(ProcessGroup):
    """A process group that serves CPU tensors itself; torch's group serves the other devices.

    It is a separate class, so that calls of groups without other devices need not check the device.
    """

    def __init__(
        self, comm: Any, store: Any, global_ranks: list[int], others: OtherBackends | OwnCuda
    ) -> None:
        super().__init__(comm, store, global_ranks)
        self.others = others
        others.join(self)
        self._batched = Batched(others.group)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> WorkBase:
        """Waits until every rank has called `barrier`, on the backend of `opts.device`."""
        device = getattr(opts, "device", None)
        if device is None or device.type == "cpu":
            return super().barrier(opts, timeout)
        return self._group_for(device, "barrier").barrier(opts)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            super()._start_coalescing(device)
        else:
            self._group_for(device, "_start_coalescing")._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> WorkBase:
        if device.type == "cpu":
            return super()._end_coalescing(device)
        return self._group_for(device, "_end_coalescing")._end_coalescing(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later calls, on every device."""
        super().set_timeout(timeout)
        self.others.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> Any:
        """Makes a group of the ranks `new_ranks`, for all devices or for `device_types`. Returns
        None on other ranks.

        All ranks of the group must call this.
        """
        new_ranks = sorted(new_ranks)  # torch sorts the ranks for the other devices too
        name, description = group_name or self._name_of_split(new_ranks), group_desc or "split"
        limit = timeout or timedelta(seconds=self.communicator.timeout_s)
        kept = ["cpu", *self.others.backends]
        if device_types is not None:
            kept = [device.type for device in device_types]
        elsewhere = [device for device in kept if device != "cpu"]
        others = None
        if elsewhere:
            others = self.others.split(new_ranks, elsewhere, limit, opts, name, description)
        if "cpu" not in kept:
            return None if others is None else others.group
        comm = self.communicator.group(new_ranks)
        if comm is None:
            return None
        comm.timeout_s = limit.total_seconds()
        ranks = [self.global_ranks[rank] for rank in new_ranks]
        group = group_over(comm, self.store, ranks, others)
        name_group(group, name, description)
        self.derived(group)
        return group

    def shrink_group(
        self, exclude: Sequence[int] = (), timeout: timedelta | None = None
    ) -> ProcessGroup:
        """Makes a new group of the living ranks, without those in `exclude`. After that, the old
        group (`self`) refuses all work.

        The backends of other devices are created again, through the store.
        """
        if self.bound_device_id is not None:
            raise UnsupportedError(
                f"a group bound to {self.bound_device_id} cannot be shrunk: destroy it and call "
                "init_process_group on the ranks that are left"
            )
        return super().shrink_group(exclude, timeout)

    def _after(self, comm: Any, store: Any, global_ranks: list[int], name: str) -> ProcessGroup:
        self.others.group.abort()  # a call that waits for a lost rank would never end
        others = self.others.recreate(comm, store, global_ranks, name)
        return MixedGroup(comm, store, global_ranks, others)

    def abort(self) -> None:
        """Ends every pending call with an error, on every device."""
        try:
            super().abort()
        finally:
            self.others.group.abort()

    def shutdown(self) -> None:
        """Leaves the group, on every device."""
        try:
            super().shutdown()
        finally:
            self.others.group.shutdown()

    def _group_for(self, device: torch.device, name: str) -> Any:
        if device.type in self.others.backends:
            return self.others.group
        served = {"cpu": self.name(), **self.others.backends}
        error = UnsupportedError(
            f"{name}: no backend of this group serves tensors on {device}; the group has "
            + ", ".join(f"{backend} for {kind}" for kind, backend in served.items())
        )
        if name in _COLLECTIVES:  # tell ranks that may wait in this collective with CPU tensors
            self.communicator.refuse(name, error)
        raise error


def _tensor_in(values: Any) -> torch.Tensor | None:
    """Returns the first tensor among `values`, which may contain lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, list | tuple):
            found = _tensor_in(value)
            if found is not None:
                return found
    return None


def _routed(name: str) -> Callable[..., Any]:
    ours = getattr(ProcessGroup, name)

    def method(self: MixedGroup, *args: Any, **options: Any) -> Any:
        tensor: Any = args[0] if args else None
        if type(tensor) is list and tensor:
            tensor = tensor[0]
        if not isinstance(tensor, torch.Tensor):
            tensor = _tensor_in((*args, *options.values()))
        if tensor is None or tensor.is_cpu:
            return ours(self, *args, **options)
        group = self._group_for(tensor.device, name)
        if name in _MESSAGES and not isinstance(group, ProcessGroup):
            return self._batched.call(name, tensor.device, *args, **options)
        return getattr(group, name)(*args, **options)

    method.__name__, method.__doc__ = name, ours.__doc__
    return method


def group_over(
    comm: Any, store: Any, global_ranks: list[int], others: OtherBackends | OwnCuda | None
) -> ProcessGroup:
    """Returns a process group over a communicator and, if given, the backends for other devices."""
    if others is None:
        return ProcessGroup(comm, store, global_ranks)
    return MixedGroup(comm, store, global_ranks, others)


for _name in ROUTED:
    setattr(MixedGroup, _name, _routed(_name))

hide_from_dynamo(MixedGroup)
