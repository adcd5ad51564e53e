"""The communicator and the controller that the ranks of a training strategy use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from unisono.communicator import Communicator, init
from unisono.controller import Controller
from unisono.torch_backend import default_communicator


class ContextOptions(TypedDict, total=False):
    """The arguments of `data_parallel` that select the ranks and their exchange of tensors."""

    comm: Communicator | None
    controller: Controller | None
    fusion_bytes: int | None
    reproducible: bool
    tune_fusion: bool | None


class RankContext:
    """A communicator and a controller.

    Each is given by the caller, or made here; `close` closes only those made here.
    """

    def __init__(
        self,
        comm: Communicator | None,
        controller: Controller | None,
        fusion_bytes: int | None = None,
        reproducible: bool = False,
        tune_fusion: bool | None = None,
    ) -> None:
        """Uses `comm`, or else the communicator of torch's default group, or else `unisono.init`.

        With `reproducible`, the controller sums in rank order. Raises `ValueError` if `controller`
        is given too, because the order of its sums cannot be changed.
        """
        if controller is not None and reproducible:
            raise ValueError(
                "reproducible: expected no controller, since this makes one; or make the controller"
                " of a communicator with reproducible=True, and omit the argument here"
            )
        self._own_comm: Communicator | None = None
        self._strict_comm: Communicator | None = None
        self._own_controller: Controller | None = None
        found = comm or default_communicator()
        if found is None:
            found = self._own_comm = init(reproducible=reproducible or None)
        self.comm = found
        if controller is None:
            controller = self._make_controller(fusion_bytes, reproducible, tune_fusion)
        self.controller = controller

    def _make_controller(
        self, fusion_bytes: int | None, reproducible: bool, tune_fusion: bool | None
    ) -> Controller:
        comm = self.comm
        if reproducible and not comm.reproducible:
            self._strict_comm = comm.split(0, comm.rank, reproducible=True)
            assert self._strict_comm is not None  # `split` returns None only for color None
            comm = self._strict_comm
        self._own_controller = Controller(comm, fusion_bytes=fusion_bytes, tune_fusion=tune_fusion)
        return self._own_controller

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Copies the tensors of rank `root` to all ranks."""
        with torch.no_grad():
            works = [self.comm.broadcast(each.detach(), root, async_op=True) for each in tensors]
            for work in works:
                work.wait()

    def close(self) -> None:
        """Closes the controller and the communicators that this context made."""
        if self._own_controller is not None:
            self._own_controller.close()
        for comm in (self._strict_comm, self._own_comm):
            if comm is not None:
                comm.close()
