"""Errors of predictions after a calibration with one other run of the same source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.own_calibration import Calibration, OwnRun
from unisono.planner.constants.run_similarity import RunSimilarity, similarity
from unisono.planner.prediction import Prediction
from unisono.planner.validation.ground_truth import MeasuredRun

_LARGEST = 12
"""Maximum number of runs of a source that are used for calibration, one after another."""


class OneRunErrors(NamedTuple):
    """Mean absolute error of the step time, the share of runs inside the 80 % interval, and the
    median ratio of the interval's ends.
    """

    error: float
    covered: float
    width: float


class _Blind(NamedTuple):
    run: MeasuredRun
    like: RunSimilarity
    predicted: Prediction


def one_run_errors(
    runs: Sequence[MeasuredRun],
    blind: Sequence[Prediction],
    constants: CalibratedConstants,
) -> OneRunErrors | None:
    """Returns the errors of predictions that are calibrated with one run of the same source.

    `blind` are the predictions with `constants`, which were fitted to other families. In each
    source, up to 12 runs are used for calibration, one at a time, and all other runs of the source
    are predicted. Returns None if no source has two runs.
    """
    errors, inside, widths = [], [], []
    known = [
        _Blind(run, similarity(run.model, run.cluster, step.layout, step.job), step)
        for run, step in zip(runs, blind, strict=True)
    ]
    for source in dict.fromkeys(run.source for run in runs):
        members = [each for each in known if each.run.source == source]
        for own in members[:: -(-len(members) // _LARGEST)]:
            calibration = Calibration(runs=(_own_run(own),))
            for other in members:
                if other is own:
                    continue
                effect = calibration.effect(other.like, constants)
                step_s = other.predicted.step_s * effect.factor
                width = constants.interval_quantile * other.predicted.deviation
                width *= np.sqrt(effect.unknown)
                errors.append(abs(step_s / other.run.measured_s - 1))
                widths.append(np.exp(2 * width))
                inside.append(abs(np.log(other.run.measured_s / step_s)) <= width)
    if not errors:
        return None
    return OneRunErrors(float(np.mean(errors)), float(np.mean(inside)), float(np.median(widths)))


def _own_run(own: _Blind) -> OwnRun:
    return OwnRun(
        name=own.run.name,
        like=own.like,
        measured_s=own.run.measured_s,
        predicted_s=own.predicted.step_s,
    )
