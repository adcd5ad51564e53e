"""The standard deviation of the logarithm of measured over predicted time.

The square of this deviation is the sum of two variances. The first variance is that of wrong
constants: the covariance of the fitted constants, propagated to the step time. So the planner is
less sure of a kind of run that no published run resembles. The second variance is that of
everything that no constant expresses. It has a part that all runs of a source share, such as the
software stack and the way to measure, and parts of the model, of the work of each device and of the
single run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.run_similarity import EVERY_RUN
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import LOW_PRECISIONS, Workload
from unisono.planner.run_choices import RunModel
from unisono.planner.step_times.step_time import StepModel

FITTED_ARCHITECTURES = ("ampere", "hopper", "blackwell")
_CHANGE = 1.05
"""Factor of a constant, for the derivative of the step time by its logarithm."""


def error_deviation(run: RunModel, layout: Layout, micro_batch: int, recompute: str) -> float:
    """Returns the standard deviation of the logarithm of measured over predicted time, without the
    effect of the user's own runs.
    """
    sigma, covariance = run.constants.sigma, run.constants.covariance
    causes = error_causes(run.model, run.cluster, run.workload)
    variance = sum(sigma[name] ** 2 for name in causes)
    if covariance.names:
        gradient = log_gradient(run.times, covariance.names, layout, micro_batch, recompute)
        variance += covariance.variance(gradient)
    return sqrt(variance)


def error_causes(model: Transformer, cluster: Cluster, job: Workload) -> tuple[str, ...]:
    """Returns the causes of the errors of a prediction, except wrong constants.

    Besides the causes of all predictions (`EVERY_RUN`), they are experts, choices that are not
    stated, formats under 16 bits (which scale values in several ways), and devices that no constant
    was fitted to.
    """
    found = list(EVERY_RUN)
    if model.experts:
        found.append("experts")
    if job.micro_batch is None or job.recompute is None:
        found.append("not stated")
    if job.precision in LOW_PRECISIONS:
        found.append("low precision")
    if cluster.kind.architecture not in FITTED_ARCHITECTURES:
        found.append("other device")
    return tuple(found)


def log_gradient(
    times: StepModel, names: Sequence[str], layout: Layout, micro_batch: int, recompute: str
) -> NDArray[np.float64]:
    """Returns the derivatives [names] of the logarithm of the step time by the logarithms of the
    constants `names`.
    """

    def step_s(constants: CalibratedConstants) -> float:
        return sum(times.with_constants(constants).step(layout, micro_batch, recompute).values())

    return gradient_of(step_s, times.constants, names)


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
