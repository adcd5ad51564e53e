"""The controller: named tensors, submitted in any order, agreed on, fused and run.

`Controller` is the public class. Its core is a pure step function (`agreement.py`): rank 0 decides
(`coordinator.py`), all ranks follow (`member.py`), by messages (`messages.py`) about requests
(`request.py`) that it puts into buckets (`fusion.py`). `loop.py` feeds the core from a thread and
does what it says. Once steps repeat, `frozen_plan.py` runs them without messages. `transfer.py` is
the interface to what moves the data.
"""

from unisono.controller.controller import Controller, ControllerStats
from unisono.controller.fusion import DEFAULT_FUSION_BYTES
from unisono.controller.handle import Handle
from unisono.controller.messages import Stalled
from unisono.controller.transfer import CommunicatorTransfer, Job, Pending, PendingVote, Transfer

__all__ = [
    "DEFAULT_FUSION_BYTES",
    "CommunicatorTransfer",
    "Controller",
    "ControllerStats",
    "Handle",
    "Job",
    "Pending",
    "PendingVote",
    "Stalled",
    "Transfer",
]
