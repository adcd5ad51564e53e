"""`parallelize`: a model divided by a layout, and its training run."""

from unisono.parallel.run.model_division import parallelize
from unisono.parallel.run.parallel_run import ParallelRun
from unisono.parallel.run.run_report import PredictedFigures, RunReport
from unisono.parallel.run.torch_schedules import pipeline_schedule

__all__ = ["ParallelRun", "PredictedFigures", "RunReport", "parallelize", "pipeline_schedule"]
