"""Predicted and published memory of published runs."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.validation.ground_truth import MeasuredRun, measured_runs
from unisono.planner.validation.predicted_runs import predict_run


@dataclass(frozen=True, kw_only=True)
class MemoryComparison:
    """A run with published memory, and the prediction for it."""

    run: MeasuredRun
    predicted_bytes: int


def validate_memory() -> list[MemoryComparison]:
    """Returns, for each run with published memory, the run and its predicted memory."""
    constants = default_constants()
    return [
        MemoryComparison(run=run, predicted_bytes=predict_run(run, constants).memory_bytes)
        for run in measured_runs()
        if run.memory_bytes is not None
    ]
