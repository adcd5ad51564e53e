"""A process group of torchft, which changes its ranks between two steps of a training run."""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper

from unisono.communicator import has_failed
from unisono.errors import CommunicationError
from unisono.torch_backend import communicator_of, group_on_store


class ProcessGroupUnisono(ProcessGroupWrapper):  # type: ignore[misc]
    """The counterpart of torchft's `ProcessGroupGloo`, for tensors in CPU memory.

        manager = torchft.Manager(pg=ProcessGroupUnisono(timeout=timedelta(seconds=30)), ...)

    `timeout` limits each reconfiguration and each collective. The manager reconfigures the group
    when ranks have died or have come back. Without a manager, torchft's `reconfigure_with_store`
    (before torchft 0.3: the method `configure`) does so from the address and prefix of a store, the
    rank and the number of ranks.
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return group_on_store(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        """Returns the name by which torchft's `register` registers the group with torch."""
        return "torchft-unisono"

    def errored(self) -> Exception | None:
        """Returns an error if the group has failed and needs a reconfiguration; else None."""
        comm = communicator_of(self._pg)
        if comm is None or not has_failed(comm):
            return None
        return CommunicationError("the group has failed: a rank is lost, or a call was ended")

    def abort(self, errored: bool = True) -> None:
        """Ends all pending calls on all ranks, and leaves the group."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.shutdown()

    def shutdown(self) -> None:
        """Leaves the group."""
        group = self._pg
        super().shutdown()
        if group is not None:
            group.shutdown()
