"""Data-parallel training of real models, as a comparison of `torch.distributed` backends.

`settings`, `events`, `rank_launch`, `progress` and `training_report` run in the parent process and
never import torch. `rank_starter` starts the ranks. `worker`, `training_loop`, `communication`,
`replicas`, `digits_task` and `text_task` run on every rank. The modules `layout_*` train one task
with one layout of `unisono.parallel`. `overlap` is an example of overlap and fusion, without torch;
`overlap_report` and `overlap_plot` are its report.
"""

from unisono.train.events import Event, Stepped
from unisono.train.layout_report import (
    figures_table,
    loss_line,
    save_passes_plot,
    tables_table,
    time_line,
    title,
)
from unisono.train.layout_settings import LayoutRun, LayoutTask
from unisono.train.overlap import Example, OverlapResult, run_overlap
from unisono.train.overlap_plot import overlap_svg
from unisono.train.overlap_report import (
    FULL_SCALE,
    hidden_line,
    overlap_json,
    overlap_table,
    overlap_trace,
)
from unisono.train.progress import shown
from unisono.train.rank_launch import launch, launch_layout
from unisono.train.settings import TaskName, TrainingRun
from unisono.train.training_report import Outcome, Report

__all__ = [
    "FULL_SCALE",
    "Event",
    "Example",
    "LayoutRun",
    "LayoutTask",
    "Outcome",
    "OverlapResult",
    "Report",
    "Stepped",
    "TaskName",
    "TrainingRun",
    "figures_table",
    "hidden_line",
    "launch",
    "launch_layout",
    "loss_line",
    "overlap_json",
    "overlap_svg",
    "overlap_table",
    "overlap_trace",
    "run_overlap",
    "save_passes_plot",
    "shown",
    "tables_table",
    "time_line",
    "title",
]
