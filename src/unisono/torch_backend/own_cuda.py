"""CUDA tensors of a group that unisono serves itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from unisono.torch_backend import BACKEND_NAME, communicator_of
from unisono.torch_backend.device import DeviceCommunicator, device_group
from unisono.torch_backend.private import name_group
from unisono.torch_backend.process_group import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCuda:
    """The process group for a group's CUDA tensors; it takes the place of `OtherBackends`."""

    group: ProcessGroup
    backends: dict[str, str]

    def join(self, ours: Any) -> None:
        """Tells torch that the group serves CUDA tensors."""
        ours.serve("cuda")

    def split(
        self,
        ranks: list[int],
        devices: Sequence[str],
        timeout: timedelta,
        options: Any,
        name: str,
        description: str,
    ) -> OwnCuda | None:
        """Returns the CUDA tensors' group of some ranks; None on other ranks."""
        comm = self.group.communicator.group(ranks)
        if comm is None:
            return None
        found = own_cuda(comm, self.group.store, [self.group.global_ranks[each] for each in ranks])
        if found is not None:
            found.group.set_timeout(timeout)
            name_group(found.group, name, description)
        return found

    def recreate(self, comm: Any, store: Any, global_ranks: list[int], name: str) -> Any:
        """Returns the CUDA tensors' group for the ranks of another communicator."""
        return own_cuda(comm, store, global_ranks)


def own_cuda(comm: Any, store: Any, global_ranks: list[int]) -> OwnCuda | None:
    """Returns the group for CUDA tensors of a communicator's ranks; None if a rank has no CUDA
    device. Collective."""
    world = dist.group.WORLD if dist.is_initialized() else None
    found: DeviceCommunicator | None = device_group(comm, communicator_of(world, "cuda"))
    if found is None:
        return None
    group = ProcessGroup(found, store, global_ranks)
    return OwnCuda(group=group, backends={"cuda": BACKEND_NAME})
