"""Data-parallel training of real models with several `torch.distributed` backends, compared.

`settings`, `events`, `torchrun`, `progress` and `report` run in the parent process and never import
torch. `worker`, `loop`, `communication`, `replicas`, `digits` and `text` run on every rank.
`overlap` is an example of overlap and fusion, without torch; `overlap_report` shows it.
"""

from unisono.train.overlap import Example, OverlapResult, run_overlap
from unisono.train.overlap_report import (
    FULL_SCALE,
    hidden_line,
    overlap_json,
    overlap_table,
    overlap_trace,
)
from unisono.train.progress import shown
from unisono.train.settings import TaskName, TrainingRun
from unisono.train.torchrun import launch
from unisono.train.training_report import Outcome, Report

__all__ = [
    "FULL_SCALE",
    "Example",
    "Outcome",
    "OverlapResult",
    "Report",
    "TaskName",
    "TrainingRun",
    "hidden_line",
    "launch",
    "overlap_json",
    "overlap_table",
    "overlap_trace",
    "run_overlap",
    "shown",
]
