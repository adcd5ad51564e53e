"""The name to which a process group answers: its backend's, or that of the backend it replaces; and
the devices for which torch finds a backend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from unisono.torch_backend import BACKEND_NAME
from unisono.torch_backend.missing_methods import DeviceBackend
from unisono.torch_backend.private import (
    ProcessGroupBase,
    device_types,
    gloo_class,
    gloo_options,
    hide_from_dynamo,
)


class NamedGroup(ProcessGroupBase):  # type: ignore[misc]
    """A process group that can answer to the name, type and options of torch's Gloo."""

    communicator: Any
    global_ranks: list[int]
    own_devices: list[str]  # served by unisono, not by another backend
    _own_backend: DeviceBackend
    _stands_in = False  # torch asks for `__class__` before __init__ has run

    def stand_in(self) -> None:
        """Makes the group answer to the name gloo, as do the groups that are derived from it."""
        self._stands_in = True

    def derived(self, group: NamedGroup) -> None:
        """Gives a group that was derived from this one the same name."""
        if self._stands_in:
            group.stand_in()

    def name(self) -> str:
        """Returns the backend's name."""
        return "gloo" if self._stands_in else BACKEND_NAME

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Returns the name for torch's C++ code, which would call methods of Gloo's C++ class."""
        return BACKEND_NAME

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # isinstance() reads this after type(), so the group is also one of torch's Gloo groups,
        # wherever a program has imported the class from.
        return gloo_class() if self._stands_in else type(self)

    def _get_backend(self, device: torch.device) -> Any:
        if self._stands_in and device.type == "cpu":
            return self  # torch's functions check its type and set its timeout
        if device.type in self.own_devices:
            return self._own_backend
        return super()._get_backend(device)

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        others = (each for each in device_types(self) if each.type not in self.own_devices)
        return [*map(torch.device, self.own_devices), *others]

    @property
    def options(self) -> Any:
        """A copy of the options of a Gloo group. Raises `AttributeError` if no stand-in."""
        if not self._stands_in:
            raise AttributeError("options: only groups that stand in for gloo have them")
        limit = timedelta(seconds=self.communicator.timeout_s)
        return gloo_options(limit, self.group_name, self.global_ranks)


hide_from_dynamo(NamedGroup)
