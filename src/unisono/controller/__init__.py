"""The controller: named tensors, submitted in any order, agreed on, fused and run.

`Controller` is the public class. Its core is a pure step function (`agreement.py`): rank 0 decides
(`coordinator.py`), all ranks follow (`member.py`), by messages (`messages.py`) about requests
(`request.py`) that it puts into buckets (`fusion.py`). `loop.py` feeds the core from a thread,
and `action_runner.py` does what it says. Once steps repeat, `frozen_plan.py` runs them without
messages. Then `fusion_tuner.py` looks for better buckets (`fusion_choice.py`), by trials of them
(`fusion_trial.py`, `trial_plan.py`). `transfer.py` is
the interface to what moves the data; `*_transfer.py` implement it.
"""

from unisono.controller.blocking_transfer import BlockingCollectives, BlockingTransfer
from unisono.controller.communicator_transfer import CommunicatorTransfer
from unisono.controller.controller import Controller, ControllerStats
from unisono.controller.fusion import DEFAULT_FUSION_BYTES
from unisono.controller.fusion_report import FusionReport
from unisono.controller.fusion_times import LinkCost, best_ends, finish_s
from unisono.controller.handle import Handle
from unisono.controller.link_transfer import LinkTransfer, LinkUse
from unisono.controller.messages import Stalled
from unisono.controller.mpi_transfer import MpiTransfer
from unisono.controller.process_group_transfer import ProcessGroupTransfer
from unisono.controller.transfer import Job, Pending, PendingVote, RemadeJob, Transfer, VotedJob

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
