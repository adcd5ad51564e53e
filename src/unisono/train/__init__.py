"""Data-parallel training of real models with several `torch.distributed` backends, compared.

`settings`, `events`, `torchrun`, `progress` and `report` run in the parent process and never import
torch. `worker`, `loop`, `communication`, `digits` and `text` run on every rank.
"""

from unisono.train.progress import shown
from unisono.train.report import Outcome, Report
from unisono.train.settings import Run, TaskName
from unisono.train.torchrun import launch

__all__ = ["Outcome", "Report", "Run", "TaskName", "launch", "shown"]
