"""Base classes of process groups and works, and the C++ backend object of a group in Python."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d

# Typed as Any: the stubs lack some of these names, and cannot describe methods that accept the
# calling conventions of several torch versions.
_c10d: Any = _distributed_c10d
WorkBase: Any = _distributed_c10d.Work
ProcessGroupBase: Any = dist.ProcessGroup

GROUP_METHODS: Final = frozenset((
    "_add_ephemeral_timeout", "_backend_id", "_has_hooks", "_id", "_pybind11_conduit_v1_",
    "_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name", "boxed",
    "rank", "size", "unbox",
))  # fmt: skip
"""Methods of torch's process group that work for every group, whatever its backends."""

BACKEND_METHODS: Final = frozenset((
    "_get_backend_name", "name", "rank", "size", "supports_tensor_alloc",
))  # fmt: skip
"""Methods of torch's backends that only answer a question."""

_PLACEHOLDERS_RAISE: Final = hasattr(_c10d.FakeProcessGroup.Options, "error_on_collective")
_NO_DATA: Final = torch.device("meta")


def attach_placeholder(group: Any, rank: int, size: int) -> Any:
    """Attaches the C++ backend object that the C++ part of a Python process group needs.

    Torch stores the group's name and description in a C++ backend, and asks it for features. This
    placeholder transfers no data: collectives that reach it raise. In torch 2.9 they would return,
    so there it serves tensors without data, and torch's C++ code finds no backend for the CPU.
    Newer versions need one for the CPU: `_c10d_functional.batch_p2p_ops` asks it for features, and
    then calls the group. The caller must keep the returned object.

    Its type is not CUSTOM: a group has only one backend of each type, and plug-ins for other
    devices have that type.
    """
    options = _c10d.FakeProcessGroup.Options()
    if _PLACEHOLDERS_RAISE:
        options.error_on_collective = True
    create = getattr(_c10d.FakeProcessGroup, "_create_internal", _c10d.FakeProcessGroup)
    placeholder: Any = create(rank, size, options)
    kind = dist.ProcessGroup.BackendType.UNDEFINED
    device = torch.device("cpu") if _PLACEHOLDERS_RAISE else _NO_DATA
    group._register_backend(device, kind, placeholder)
    group._set_default_backend(kind)
    return placeholder


def serve_device(group: Any, device: str, placeholder: Any) -> None:
    """Adds a group's placeholder for the tensors of another device."""
    if _PLACEHOLDERS_RAISE:
        kind = dist.ProcessGroup.BackendType.UNDEFINED
        group._register_backend(torch.device(device), kind, placeholder)


def device_types(group: Any) -> list[torch.device]:
    """Returns the devices for which a group has C++ backends, except for tensors without data."""
    found = ProcessGroupBase._device_types.__get__(group)
    return [device for device in found if device != _NO_DATA]


def name_group(group: Any, name: str, description: str) -> None:
    """Sets a group's description and its name, by which compiled code finds it."""
    group._set_group_name(name)
    group._set_group_desc(description)
