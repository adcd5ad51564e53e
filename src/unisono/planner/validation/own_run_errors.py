"""Errors of predictions after a calibration with other runs of the same source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import numpy as np

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.error_distribution import ErrorDistribution
from unisono.planner.constants.own_calibration import Calibration
from unisono.planner.prediction import Prediction
from unisono.planner.run_choices import RunModel
from unisono.planner.validation.ground_truth import MeasuredRun

_CALIBRATIONS = 12
"""Maximum number of calibrations with runs of a source, one after another."""
_PREDICTED = 100
"""Maximum number of runs of a source that are predicted with these calibrations."""


@dataclass(frozen=True, kw_only=True)
class OwnRunErrors:
    """Errors after a calibration with runs of the same source. Each predicted run counts once: it
    counts with its mean over the calibrations.
    """

    runs: int
    """Number of runs in each calibration."""
    error: float
    """Mean absolute error of the step time."""
    blind_error: float
    """Mean absolute error of the same runs without calibration."""
    covered: float
    """Share of runs inside the 80 % interval."""
    width: float
    """Median ratio of the interval's ends."""


class CalibratedStep(NamedTuple):
    """The prediction of a run, calibrated with other runs of its source."""

    run: MeasuredRun
    blind_s: float
    """Step time without calibration."""
    step_s: float
    errors: ErrorDistribution
    weight: float
    """Weight of this prediction in a mean over runs. The weights of each run sum to 1."""


class _Blind(NamedTuple):
    run: MeasuredRun
    step: Prediction


def own_run_errors(
    runs: Sequence[MeasuredRun],
    blind: Sequence[Prediction],
    constants: CalibratedConstants,
    count: int,
) -> OwnRunErrors | None:
    """Returns the errors of predictions that are calibrated with `count` runs of the same source.

    `blind` are the predictions of `runs` with `constants`, which were fitted to other families. In
    each source, at most 12 sets of `count` runs are used, one at a time, to predict at most 100
    other runs. Returns None if no source has more than `count` runs.
    """
    steps = calibrated_steps(runs, blind, constants, count)
    if not steps:
        return None
    half = np.array([each.errors.half_width(constants.interval_quantile) for each in steps])
    logs = np.array([log(each.run.measured_s / each.step_s) for each in steps])
    before = np.array([log(each.run.measured_s / each.blind_s) for each in steps])
    weights = np.array([each.weight for each in steps])
    return OwnRunErrors(
        runs=count,
        error=float(np.average(np.abs(np.expm1(-logs)), weights=weights)),
        blind_error=float(np.average(np.abs(np.expm1(-before)), weights=weights)),
        covered=float(np.average(np.abs(logs) <= half, weights=weights)),
        width=exp(2 * _median(half, weights)),
    )


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order[np.searchsorted(reached, 0.5)]])


def calibrated_steps(
    runs: Sequence[MeasuredRun],
    blind: Sequence[Prediction],
    constants: CalibratedConstants,
    count: int,
) -> list[CalibratedStep]:
    """Returns the predictions of `own_run_errors`."""
    pairs = [_Blind(run, step) for run, step in zip(runs, blind, strict=True)]
    found: list[CalibratedStep] = []
    for source in dict.fromkeys(run.source for run in runs):
        members = [each for each in pairs if each.run.source == source]
        predicted = range(0, len(members), -(-len(members) // _PREDICTED))
        sets = _own_sets(len(members), count)
        for own in sets:
            others = [i for i in predicted if i not in own]
            steps = _steps_after([members[i] for i in own], [members[i] for i in others], constants)
            for i, step in zip(others, steps, strict=True):
                times = sum(i not in each for each in sets)
                found.append(step._replace(weight=1 / times))
    return found


def _own_sets(total: int, count: int) -> list[tuple[int, ...]]:
    """Returns sets of `count` of `total` runs, at equal distances in the order of the table."""
    if total <= count:
        return []
    starts = range(0, total, -(-total // _CALIBRATIONS))
    return [tuple((first + i * total // count) % total for i in range(count)) for first in starts]


def _steps_after(
    own: Sequence[_Blind], others: Sequence[_Blind], constants: CalibratedConstants
) -> Iterator[CalibratedStep]:
    calibration = Calibration(
        runs=tuple(each.step.as_own_run(each.run.name, each.run.measured_s) for each in own)
    )
    for run, blind in others:
        known = RunModel(run.model, run.cluster, run.job, constants, calibration)
        # The run had one configuration, so the open choices are those of the blind prediction.
        micro_batch, recompute = blind.job.micro_batch, blind.job.recompute
        assert micro_batch is not None and recompute is not None
        choice = blind.layout, micro_batch, recompute
        errors = (known.own or known.blind).errors(known.similarity(*choice), blind.derivatives)
        step_s = sum(known.step(*choice).values())
        yield CalibratedStep(run, blind.step_s, step_s, errors, 1.0)
