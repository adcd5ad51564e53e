"""The width of the 80 % interval in standard deviations, from the errors on published runs.

Errors have heavier tails than their fitted distribution, and a few sources have most of the runs.
So the width is the smallest one that contains a little over 80 % of the runs in each of several
counts: with constants that were fitted to all sources, with constants that were fitted to the other
sources, and with the latter after 1, 2 and 3 own runs. It also contains most runs of the sources
that only judge the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import log
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.error_distribution import ErrorDistribution
from unisono.planner.validation.ground_truth import MeasuredRun
from unisono.planner.validation.judged_runs import judged_runs
from unisono.planner.validation.own_run_errors import calibrated_steps
from unisono.planner.validation.predicted_runs import grouped, predict_run, row_name

COVERED = 0.82
"""Share of the runs that the interval must contain: a little over 80 %."""
COVERED_JUDGED = 0.75
"""Share of the runs that only judge the planner that the interval must contain. A little under
80 %, because no software of the planner describes some of these sources."""
_OWN_RUNS = (1, 2, 3)
_ALMOST_CERTAIN = 1 - 1e-12


class _Errors(NamedTuple):
    """Errors of the runs of one row of the table of errors, in standard deviations."""

    row: str
    sizes: tuple[float, ...]
    weights: tuple[float, ...]
    """Weight of each error; they sum to the number of runs."""


def interval_quantile(
    runs: Sequence[MeasuredRun],
    every: CalibratedConstants,
    folds: Mapping[str, CalibratedConstants],
) -> float:
    """Returns half of the interval's width in standard deviations.

    `every` are constants fitted to all families, `folds` those fitted without one family. Half of
    the counts are means over all runs, half are means over the rows of the table of errors.
    """
    members: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        members.setdefault(row_name(run), []).append(run)
    counts: list[list[_Errors]] = [[] for _ in range(2 + len(_OWN_RUNS))]
    for row, those in members.items():
        fold = folds[those[0].family]
        counts[0].append(_blind_errors(row, tuple(those), every))
        counts[1].append(_blind_errors(row, tuple(those), fold))
        for rows, own in zip(counts[2:], _OWN_RUNS, strict=True):
            errors = _own_run_errors(row, tuple(those), fold, own)
            if errors.sizes:
                rows.append(errors)
    judged = [
        _blind_errors(source, tuple(those), every)
        for source, those in grouped(judged_runs(), lambda run: run.source)
    ]
    return max(_widest(judged, COVERED_JUDGED), *(_widest(rows, COVERED) for rows in counts))


def _widest(rows: Sequence[_Errors], share: float) -> float:
    """Returns the smallest size that covers this share both as a mean over the runs and as a mean
    over the rows.
    """
    sizes = [size for each in rows for size in each.sizes]
    weights = np.concatenate([each.weights for each in rows])
    by_row = np.concatenate([np.array(each.weights) / sum(each.weights) for each in rows])
    return max(weighted_quantile(sizes, w.tolist(), share) for w in (weights, by_row))


def weighted_quantile(sizes: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Returns the smallest of `sizes` that at least `share` of all sizes, by weight, do not exceed.

    >>> weighted_quantile([0.1, 0.4, 0.2], [1, 1, 2], 0.75)
    0.2
    """
    order = np.argsort(sizes)
    reached = np.cumsum(np.array(weights)[order]) / sum(weights)
    return float(sizes[order[np.searchsorted(reached, share - 1e-9)]])


@cache
def _blind_errors(
    row: str, runs: tuple[MeasuredRun, ...], constants: CalibratedConstants
) -> _Errors:
    steps = [(run, predict_run(run, constants)) for run in runs]
    sizes = tuple(standard_error(run.measured_s / each.step_s, each.errors) for run, each in steps)
    return _Errors(row, sizes, (1.0,) * len(runs))


@cache
def _own_run_errors(
    row: str, runs: tuple[MeasuredRun, ...], constants: CalibratedConstants, own: int
) -> _Errors:
    blind = [predict_run(run, constants) for run in runs]
    steps = calibrated_steps(runs, blind, constants, own)
    sizes = tuple(standard_error(each.run.measured_s / each.step_s, each.errors) for each in steps)
    return _Errors(row, sizes, tuple(each.weight for each in steps))


def standard_error(ratio: float, errors: ErrorDistribution) -> float:
    """Returns how rare a ratio of measured to predicted time is, as the number of standard
    deviations that a normal distribution exceeds equally rarely.

    >>> errors = ErrorDistribution(weights=(1.0,), means=(0.0,), deviations=(0.1,))
    >>> round(standard_error(1.2, errors), 4)  # log(1.2) / 0.1
    1.8232
    """
    inside = min(errors.within(abs(log(ratio))), _ALMOST_CERTAIN)
    return NormalDist().inv_cdf((1 + inside) / 2)
