"""The derivatives of the step time by the constants.

With the covariance of the constants, they give the part of a prediction's error that wrong
constants cause. So the planner is less sure of a kind of run that no published run resembles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.layout import Layout
from unisono.planner.step_times.step_time import StepModel

_CHANGE = 1.05
"""Factor of a constant, for the derivative of the step time by its logarithm."""


def log_gradient(
    times: StepModel, names: Sequence[str], layout: Layout, micro_batch: int, recompute: str
) -> NDArray[np.float64]:
    """Returns the derivatives [names] of the logarithm of the step time by the logarithms of the
    constants `names`.
    """

    def log_step(model: StepModel) -> float:
        return log(sum(model.step(layout, micro_batch, recompute).values()))

    now = log_step(times)
    models = [times.scaled(name, _CHANGE) for name in names]
    changed = [now if model is times else log_step(model) for model in models]
    return (np.array(changed) - now) / log(_CHANGE)


def gradient_of(
    step_s: Callable[[CalibratedConstants], float],
    constants: CalibratedConstants,
    names: Sequence[str],
) -> NDArray[np.float64]:
    """Returns the derivatives [names] of the logarithm of `step_s` at these constants, by the
    logarithms of the constants `names`.
    """
    now = log(step_s(constants))
    changed = [log(step_s(constants.scaled(name, _CHANGE))) for name in names]
    return (np.array(changed) - now) / log(_CHANGE)
