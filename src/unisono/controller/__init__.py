"""The controller: runs collectives on named tensors, which each rank may submit in any order.

`Controller` is the public class. Its core is a pure step function (`agreement.py`): rank 0 decides
(`coordinator.py`), all ranks follow (`member.py`). Ranks exchange `messages.py` about the tensors
that programs submit (`request.py`). `loop.py` feeds the core from a thread, and `action_runner.py`
runs the actions that the core returns. Once steps repeat, `frozen_plan.py` runs them without
messages.

`fusion/` decides which tensors share a message. `transfers/` moves the data.
"""

from unisono.controller.controller import Controller, ControllerStats
from unisono.controller.fusion.buckets import DEFAULT_FUSION_BYTES
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.fusion_times import LinkCost, best_ends, finish_s
from unisono.controller.handle import Handle
from unisono.controller.messages import Stalled
from unisono.controller.transfers.blocking_transfer import BlockingCollectives, BlockingTransfer
from unisono.controller.transfers.communicator_transfer import CommunicatorTransfer
from unisono.controller.transfers.link_transfer import LinkTransfer, LinkUse
from unisono.controller.transfers.mpi_transfer import MpiTransfer
from unisono.controller.transfers.process_group_transfer import ProcessGroupTransfer
from unisono.controller.transfers.transfer import (
    Job,
    Pending,
    PendingVote,
    RemadeJob,
    Transfer,
    VotedJob,
)

__all__ = [
    "DEFAULT_FUSION_BYTES",
    "BlockingCollectives",
    "BlockingTransfer",
    "CommunicatorTransfer",
    "Controller",
    "ControllerStats",
    "FusionReport",
    "Handle",
    "Job",
    "LinkCost",
    "LinkTransfer",
    "LinkUse",
    "MpiTransfer",
    "Pending",
    "PendingVote",
    "ProcessGroupTransfer",
    "RemadeJob",
    "Stalled",
    "Transfer",
    "VotedJob",
    "best_ends",
    "finish_s",
]
