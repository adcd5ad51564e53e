"""Errors on the runs of a source, with constants that were fitted to all other sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from constant_fit import ConstantFit
from interval_fit import SourceErrors, fit_parts
from layout_ranking import ranking
from published_runs import PublishedRun, grouped, predict_run

from unisono.planner import Prediction
from unisono.planner.constants.calibrated_constants import CalibratedConstants

_LARGEST = 20
"""Largest number of runs of a source that count in the fit of the intervals."""


@dataclass(frozen=True, kw_only=True)
class LeftOutSource:
    """The runs of a source, and their predictions without it."""

    name: str
    runs: tuple[PublishedRun, ...]
    predictions: tuple[Prediction, ...]
    constants: CalibratedConstants
    """The constants of the predictions. Both they and the parts of errors (`sigma`) are fitted to
    the other sources."""

    @property
    def ratios(self) -> np.ndarray:
        """Predicted over measured times [runs]."""
        pairs = zip(self.runs, self.predictions, strict=True)
        return np.array([each.step_s / run.measured_s for run, each in pairs])

    @property
    def error(self) -> float:
        """Mean absolute error of the step time."""
        return float(np.mean(np.abs(self.ratios - 1)))

    @property
    def bias(self) -> float:
        """Mean logarithm of measured over predicted time."""
        return -float(np.mean(np.log(self.ratios)))

    @property
    def covered(self) -> float:
        """Share of runs inside the 80 % interval."""
        pairs = zip(self.runs, self.predictions, strict=True)
        return float(np.mean([p.low_s <= run.measured_s <= p.high_s for run, p in pairs]))

    @property
    def width(self) -> float:
        """Median ratio of the upper to the lower end of the interval."""
        return float(np.median([each.high_s / each.low_s for each in self.predictions]))

    @property
    def ranking(self) -> tuple[float | None, float | None]:
        """Kendall's tau and the regret of layouts (`layout_ranking.ranking`)."""
        return ranking(self.runs, [each.step_s for each in self.predictions])


def left_out_sources(fit: ConstantFit, runs: Sequence[PublishedRun]) -> list[LeftOutSource]:
    """Returns all sources of `runs`, each predicted without it."""
    members = grouped(runs, lambda run: run.source)
    constants = {name: fit.constants(left_out=name) for name, _ in members}
    errors = source_errors(members, constants)
    every = fit_parts(errors)
    found = []
    for name, those in members:
        sigma = fit_parts([each for each in errors if each.name != name], start=every)
        known = constants[name].changed(sigma=sigma)
        predictions = tuple(predict_run(run, known) for run in those)
        found.append(
            LeftOutSource(name=name, runs=tuple(those), predictions=predictions, constants=known)
        )
    return found


def source_errors(
    members: Sequence[tuple[str, list[PublishedRun]]],
    constants: Mapping[str, CalibratedConstants],
) -> list[SourceErrors]:
    """Returns the errors of each source with its constants, and their causes, for `fit_parts`."""
    found = []
    for name, those in members:
        kept = those[:: -(-len(those) // _LARGEST)]
        steps = [predict_run(run, constants[name]) for run in kept]
        pairs = zip(kept, steps, strict=True)
        errors = np.log([run.measured_s / step.step_s for run, step in pairs])
        weights = np.array([step.causes.weights() for step in steps])
        found.append(SourceErrors(name, errors, weights))
    return found
