"""Torch's function that makes process groups, and the backends of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d

from unisono.torch_backend.private.active_calls import call_under_way
from unisono.torch_backend.private.group_tables import forget_group

# Typed as Any: the stubs lack some of these names.
_c10d: Any = _distributed_c10d
_torch_groups: Any = dist.distributed_c10d

MAKING: Final = (
    "backend_config",
    "backend_options",
    "global_ranks_in_group",
    "group_desc",
    "group_name",
    "group_rank",
    "group_size",
    "pg",
    "store",
    "timeout",
)
"""Local variables of torch's function that makes groups. This module reads them."""

_make_group: Any = _torch_groups._new_process_group_helper


def group_being_made() -> dict[str, Any]:
    """Returns the `MAKING` variables of the group that torch is making; {} if torch is making none.

    Torch does not pass the group's other devices and their backends to a Python backend. So this
    reads them from the caller's local variables.
    """
    call = call_under_way(_make_group)
    variables = call.f_locals if call else {}
    return {name: variables[name] for name in MAKING} if call else {}


def make_group(backends: dict[str, str], **arguments: Any) -> Any:
    """Makes a process group of torch's class with a backend for each device, without registering
    it.

    `arguments` are those of torch's function. Raises torch's errors, such as for a backend that
    this machine lacks.
    """
    backend = ",".join(f"{device}:{name}" for device, name in backends.items())
    group, _ = _make_group(backend=backend, **arguments)
    forget_group(group)
    return group


def add_backends(group: Any, source: Any, backends: dict[str, str]) -> None:
    """Adds the backends of another group for these devices."""
    for device, name in backends.items():
        found = source._get_backend(torch.device(device))
        kind = dist.Backend.backend_type_map[name]
        group._register_backend(torch.device(device), kind, found)


def set_default_backend(group: Any, name: str) -> None:
    """Makes the backend `name` the default for calls without a device."""
    group._set_default_backend(dist.Backend.backend_type_map[name])


def coalesces(group: Any, device: torch.device) -> bool:
    """Returns True if a group's backend for a device can coalesce messages."""
    return bool(group._get_backend(device).supports_coalescing)


def prefixed(store: Any, prefix: str) -> Any:
    """Returns a view of a store with `prefix` before each key (public, but not in torch's
    stubs).
    """
    return _c10d.PrefixStore(prefix, store)


def gloo_class() -> Any:
    """Returns torch's class of Gloo groups; None if torch was built without Gloo."""
    return getattr(_c10d, "ProcessGroupGloo", None)


def gloo_options(timeout: timedelta, name: str, global_ranks: list[int]) -> Any:
    """Returns the options of a Gloo group with this timeout, name and ranks."""
    options = gloo_class()._Options()
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = global_ranks
    return options


def gloo_threads(options: Any) -> int:
    """Returns the number of threads in options of Gloo."""
    found: int = options._threads
    return found
