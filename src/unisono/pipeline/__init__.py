"""Pipeline schedules: their rules, the order of their tasks, and their simulation.

>>> from unisono import pipeline
>>> orders = pipeline.stage_tasks("1f1b", stages=2, microbatches=4)
>>> run = pipeline.run_tasks(orders, lambda task: 2.0 if task.kind == "B" else 1.0)
>>> run.makespan_s, round(run.bubble, 3)
(15.0, 0.2)

`schedules` is the table of all schedules: the planner, `unisono.parallel` and the commands read it.
`run_tasks` simulates ranks that compute, and `simulate_pipeline` also the messages between them on
a network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names
from unisono.pipeline.schedules import SCHEDULES, ScheduleRules, stage_tasks
from unisono.pipeline.task_order import PipelineSize
from unisono.pipeline.task_simulation import StageTask, TaskGroup, TaskRun, TaskSpan, run_tasks

if TYPE_CHECKING:
    from unisono.pipeline.network_simulation import PipelineSimulation, simulate_pipeline
    from unisono.pipeline.pipeline_plot import save_task_plot, task_svg
    from unisono.pipeline.pipeline_schedule import PipelineSchedule, StageMessage, StageTimes

_NAMES = {
    "network_simulation": ("PipelineSimulation", "simulate_pipeline"),
    "pipeline_schedule": ("PipelineSchedule", "StageMessage", "StageTimes"),
    "pipeline_plot": ("save_task_plot", "task_svg"),
}
__getattr__ = lazy_names(
    __name__, {f"{__name__}.{module}": names for module, names in _NAMES.items()}
)

__all__ = [
    "SCHEDULES",
    "PipelineSchedule",
    "PipelineSimulation",
    "PipelineSize",
    "ScheduleRules",
    "StageMessage",
    "StageTask",
    "StageTimes",
    "TaskGroup",
    "TaskRun",
    "TaskSpan",
    "run_tasks",
    "save_task_plot",
    "simulate_pipeline",
    "stage_tasks",
    "task_svg",
]
