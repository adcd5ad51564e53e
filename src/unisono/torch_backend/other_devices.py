"""Backends for a group's other devices: `cuda:nccl` in `cuda:nccl,cpu:unisono`.

Torch treats a Python backend as the whole group, and creates no other backend after it. So this
module creates the backends of other devices with torch's own function, in a separate process group
of torch's class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from unisono.errors import UnsupportedError
from unisono.torch_backend import BACKEND_NAME, Options
from unisono.torch_backend.private import add_backends, make_group, set_default_backend

_ARGUMENTS = (
    "global_ranks_in_group",
    "group_desc",
    "group_name",
    "group_rank",
    "group_size",
    "store",
    "timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBackends:
    """The backends for devices other than the CPU: torch's process group of the same ranks, and the
    name of its backend for each device.
    """

    group: Any
    backends: dict[str, str]

    def join(self, ours: Any) -> None:
        """Adds these backends to unisono's group, where torch searches for them."""
        if self.group.bound_device_id is not None:
            ours.bound_device_id = self.group.bound_device_id
        add_backends(ours, self.group, self.backends)

    def split(
        self,
        ranks: list[int],
        devices: Sequence[str],
        timeout: timedelta,
        options: Any,
        name: str,
        description: str,
    ) -> OtherBackends | None:
        """Returns the backends of some devices for a subgroup; None on ranks outside the subgroup.

        All ranks of the group must call this, since NCCL's split is a collective over all of them.
        """
        kept = {device: self.backends[device] for device in devices}
        chosen = () if kept == self.backends else ([torch.device(device) for device in kept],)
        try:
            part = self.group.split_group(ranks, timeout, options, name, description, *chosen)
        except TypeError as error:
            if not chosen:
                raise
            raise UnsupportedError(
                f"split_group: torch {torch.__version__} splits {', '.join(self.backends)} only "
                f"together, not {', '.join(kept)} alone: leave device_types out"
            ) from error
        return None if part is None else OtherBackends(group=part, backends=kept)

    def recreate(self, comm: Any, store: Any, global_ranks: list[int], name: str) -> OtherBackends:
        """Creates the same backends through the store, for the ranks of another communicator."""
        group = make_group(
            self.backends,
            backend_options=None,
            global_ranks_in_group=global_ranks,
            group_desc="shrunk",
            group_name=name,
            group_rank=comm.rank,
            group_size=comm.size,
            store=store,
            timeout=timedelta(seconds=comm.timeout_s),
        )
        return OtherBackends(group=group, backends=self.backends)


def other_backends_of(making: dict[str, Any]) -> OtherBackends | None:
    """Returns the other backends that torch requests for its new group; None if there are none.

    Torch has already created the backends that precede unisono in its list of devices.
    """
    if not making:
        return None
    asked = _checked(making["backend_config"].get_device_backend_map())
    backends = {device: name for device, name in asked.items() if name != BACKEND_NAME}
    # if the CPU has another backend, that backend may use unisono internally
    if not backends or asked.get("cpu") != BACKEND_NAME:
        return None
    order = list(asked)
    later = {
        device: name
        for device, name in backends.items()
        if order.index(device) > order.index("cpu")
    }
    group, options = making["pg"], making["backend_options"]
    if later:
        made = make_group(
            later,
            backend_options=None if isinstance(options, Options) else options,
            **{name: making[name] for name in _ARGUMENTS},
        )
        add_backends(group, made, later)
    names = list(backends.values())
    set_default_backend(group, dist.Backend.NCCL if dist.Backend.NCCL in names else names[0])
    return OtherBackends(group=group, backends=backends)


def serves_cuda(making: dict[str, Any]) -> bool:
    """Returns True if torch requests unisono for CUDA tensors of its new group."""
    if not making:
        return False
    return bool(making["backend_config"].get_device_backend_map().get("cuda") == BACKEND_NAME)


def _checked(asked: dict[str, str]) -> dict[str, str]:
    for device, name in asked.items():
        if name != BACKEND_NAME or device == "cpu":
            continue
        if device != "cuda":
            raise UnsupportedError(
                f"unisono serves tensors in CPU memory and on CUDA devices, not on {device}: "
                f"give 'cpu:{BACKEND_NAME},{device}:' and the name of a backend for {device}"
            )
        if asked.get("cpu", BACKEND_NAME) != BACKEND_NAME:
            raise UnsupportedError(
                f"cuda:{BACKEND_NAME} needs the same backend for CPU tensors, not {asked['cpu']}: "
                f"give 'cpu:{BACKEND_NAME},cuda:{BACKEND_NAME}'"
            )
    return asked
