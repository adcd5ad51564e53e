"""Unisono: collective communication for AI training.

`run` starts ranks on this machine. `init` joins the group of all ranks. `Communicator` has the
collectives. PyTorch programs call `torch.distributed.init_process_group("unisono")` instead.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    AbortedError,
    AuthenticationError,
    CollectiveTimeoutError,
    CommunicationError,
    MismatchError,
    PeerLostError,
    RendezvousError,
    ScheduleError,
    UnisonoError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from unisono import algorithms, parallel, planner, schedule, show, simulator, topology
    from unisono.communicator import (
        Communicator,
        Window,
        Work,
        get_include,
        group_address,
        init,
        pairs,
        premul_sum,
    )
    from unisono.controller import Controller
    from unisono.launch import run
    from unisono.simulator import simulate

# Loaded on first use. Torch, when imported, imports this package through the plug-in entry point,
# so importing this package must be cheap and load no native code.
_LAZY = {
    "Communicator": "unisono.communicator",
    "Controller": "unisono.controller",
    "Window": "unisono.communicator",
    "Work": "unisono.communicator",
    "get_include": "unisono.communicator",
    "group_address": "unisono.communicator",
    "init": "unisono.communicator",
    "pairs": "unisono.communicator",
    "premul_sum": "unisono.communicator",
    "run": "unisono.launch",
    "simulate": "unisono.simulator",
}
_LAZY_MODULES = ("algorithms", "parallel", "planner", "schedule", "show", "simulator", "topology")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _LAZY_MODULES:
        value = importlib.import_module(f"unisono.{name}")
    else:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AbortedError",
    "AuthenticationError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "Communicator",
    "Controller",
    "MismatchError",
    "PeerLostError",
    "RendezvousError",
    "ScheduleError",
    "UnisonoError",
    "UnsupportedError",
    "Window",
    "Work",
    "algorithms",
    "get_include",
    "group_address",
    "init",
    "pairs",
    "parallel",
    "planner",
    "premul_sum",
    "run",
    "schedule",
    "show",
    "simulate",
    "simulator",
    "topology",
]
