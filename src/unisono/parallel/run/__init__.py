"""`parallelize`: a model divided by a layout, and its training run."""

from unisono.parallel.run.figures.run_report import PredictedFigures, RunReport
from unisono.parallel.run.loss.own_loss import model_loss
from unisono.parallel.run.parallel_run import ParallelRun
from unisono.parallel.run.parallelize_model import parallelize
from unisono.parallel.run.pipeline.schedules import pipeline_schedule
from unisono.parallel.run.weight_average import WeightAverage

__all__ = [
    "ParallelRun",
    "PredictedFigures",
    "RunReport",
    "WeightAverage",
    "model_loss",
    "parallelize",
    "pipeline_schedule",
]
