"""The ranks that a training strategy runs on: their communicator and controller."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.communicator import Communicator, init
from unisono.controller import Controller
from unisono.torch_backend import default_communicator


class RankContext:
    """A communicator and a controller, given or made. `close` closes what was made."""

    def __init__(
        self,
        comm: Communicator | None,
        controller: Controller | None,
        fusion_bytes: int | None = None,
    ) -> None:
        """Finds the ranks: `comm`, else torch's default group, else those of `unisono.init`."""
        self._own_comm: Communicator | None = None
        self._own_controller: Controller | None = None
        found = comm or default_communicator()
        if found is None:
            found = self._own_comm = init()
        self.comm = found
        if controller is None:
            controller = self._own_controller = Controller(found, fusion_bytes=fusion_bytes)
        self.controller = controller

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Copies the tensors of rank `root` to all ranks."""
        with torch.no_grad():
            works = [self.comm.broadcast(each.detach(), root, async_op=True) for each in tensors]
            for work in works:
                work.wait()

    def close(self) -> None:
        """Closes the controller and the communicator that this context made."""
        if self._own_controller is not None:
            self._own_controller.close()
        if self._own_comm is not None:
            self._own_comm.close()
