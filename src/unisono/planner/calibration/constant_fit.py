"""Fits the constants to measured runs: `python -m unisono.planner.calibration.constant_fit`.

The fit minimises a robust loss of two kinds of logarithms: those of the measured over the predicted
time, for each run, and those of the value over the prior value, for each constant. It needs SciPy.
Runs are weighted so that a family of n runs counts as n^(1/2). For cross-validation, the constants
are also fitted without each family (a fold). Each fit also gives the parts that errors have in
common and the covariance of the constants, which together determine the 80 % interval
(`interval_fit` fits only these).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.planner.calibration.error_components import (
    ErrorGroups,
    ErrorLikelihood,
    constants_factor,
    fit_parts,
)
from unisono.planner.calibration.interval_width import interval_quantile
from unisono.planner.calibration.source_spread import fit_source_spread, source_errors
from unisono.planner.constant_derivatives import log_gradient
from unisono.planner.constants.calibrated_constants import (
    CalibratedConstants,
    constants_document,
    constants_from,
)
from unisono.planner.constants.constant_covariance import ConstantCovariance, covariances_text
from unisono.planner.run_choices import RunModel
from unisono.planner.validation.ground_truth import MeasuredRun, measured_runs

_DEVIATION = 0.08
"""Error of a step time that counts as much as a constant one width away from its prior."""
_STEP = 1e-2
_ROUNDS = 2
"""Number of successive fits. Each fit keeps open choices, such as the micro batch, fixed."""
_SENSITIVE = 0.02
"""Minimum relative change of a time, per relative change of a constant, in a run that determines
the constant."""
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ConstantFit:
    """Constants fitted to runs, by name, with their covariance and the parts of the errors."""

    values: Mapping[str, float]
    """All constants except those of intervals. Those that were not fitted have their priors."""
    sigma: Mapping[str, float]
    covariance: ConstantCovariance


class _FixedRun:
    """A run whose open choices, such as the micro batch, are made once, with the first set of
    constants.
    """

    def __init__(self, run: MeasuredRun, constants: CalibratedConstants) -> None:
        self._run = run
        model = RunModel(run.model, run.cluster, run.job, constants)
        self._times = model.times
        self._choice = model.fastest(run.layout)[:3]

    def error(self, constants: CalibratedConstants) -> float:
        """Returns the logarithm of the measured over the predicted time."""
        kinds = self._times.with_constants(constants).step(*self._choice)
        return float(np.log(self._run.measured_s / sum(kinds.values())))

    def gradient(self, constants: CalibratedConstants, names: Sequence[str]) -> _Floats:
        return log_gradient(self._times.with_constants(constants), names, *self._choice)


class _Priors:
    """The priors of all constants and of the errors' parts, and the widths of fitted constants."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        entries = document["constants"]
        self.values = {name: entry["prior"] for name, entry in entries.items()}
        self.names = tuple(name for name, entry in entries.items() if entry.get("width"))
        self.widths = np.array([entries[name]["width"] for name in self.names])
        self.sigma = {
            name.removeprefix("sigma/"): value
            for name, value in self.values.items()
            if name.startswith("sigma/")
        }

    def moved(self, offsets: _Floats) -> dict[str, float]:
        """Returns the constants whose logarithms are the priors' logarithms plus `offsets`."""
        pairs = zip(self.names, offsets, strict=True)
        return {**self.values, **{name: self.values[name] * float(np.exp(x)) for name, x in pairs}}

    def offsets(self, values: Mapping[str, float]) -> _Floats:
        return np.log([values[name] / self.values[name] for name in self.names])


def fit_constants(
    runs: Sequence[MeasuredRun], document: Mapping[str, Any] | None = None
) -> ConstantFit:
    """Returns the constants fitted to runs. `document` has the priors and their widths.

    Raises ImportError without SciPy.
    """
    priors = _Priors(document or constants_document())
    values = dict(priors.values)
    for _ in range(_ROUNDS):
        values = _fit_once(runs, priors, values)
    return fit_intervals(runs, values, document)


def _fit_once(
    runs: Sequence[MeasuredRun], priors: _Priors, start: Mapping[str, float]
) -> dict[str, float]:
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    fixed = [_FixedRun(run, _constants(start)) for run in runs]
    weights = _weights(runs) / _DEVIATION

    def residuals(offsets: _Floats) -> _Floats:
        constants = _constants(priors.moved(offsets))
        errors = np.array([run.error(constants) for run in fixed])
        return np.concatenate([errors * weights, offsets / priors.widths])

    begin = priors.offsets(start)
    found = least_squares(residuals, begin, loss="soft_l1", max_nfev=6, diff_step=_STEP)
    return priors.moved(found.x)


def _weights(runs: Sequence[MeasuredRun]) -> _Floats:
    families = [run.family for run in runs]
    return np.array([2 * families.count(family) ** -0.25 for family in families])


def fit_intervals(
    runs: Sequence[MeasuredRun],
    values: Mapping[str, float],
    document: Mapping[str, Any] | None = None,
) -> ConstantFit:
    """Returns the constants with their covariance and the parts of the errors, from the errors and
    their derivatives at these values.
    """
    priors = _Priors(document or constants_document())
    groups = ErrorGroups(runs)
    errors, gradients = _linearised(runs, values, priors.names)
    likelihood = ErrorLikelihood(
        groups, errors, gradients, priors.offsets(values), priors.widths, priors.sigma
    )
    parts = fit_parts(likelihood, groups)
    factor = constants_factor(groups.covariance(parts), gradients, priors.widths)
    rows = tuple(tuple(map(float, row[: i + 1])) for i, row in enumerate(factor))
    covariance = ConstantCovariance(names=priors.names, factor=rows)
    return ConstantFit(values=values, sigma=parts.sigma, covariance=covariance)


def _linearised(
    runs: Sequence[MeasuredRun], values: Mapping[str, float], names: Sequence[str]
) -> tuple[_Floats, _Floats]:
    """Returns the errors of runs, and the derivatives of their predicted times by constants."""
    constants = _constants(values)
    fixed = [_FixedRun(run, constants) for run in runs]
    errors = np.array([run.error(constants) for run in fixed])
    return errors, np.array([run.gradient(constants, names) for run in fixed])


def _constants(
    values: Mapping[str, float], covariance: ConstantCovariance | None = None
) -> CalibratedConstants:
    entries = {name: {"value": value} for name, value in values.items()}
    return constants_from({"constants": entries}, covariance)


def informing_families(
    runs: Sequence[MeasuredRun], values: Mapping[str, float], name: str
) -> list[str]:
    """Returns the families in which a change of the constant noticeably changes the predicted time
    of at least one run.
    """
    changed = _constants({**values, name: values[name] * (1 + _STEP)})
    found = {}
    for run in runs:
        if run.family not in found:
            fixed = _FixedRun(run, _constants(values))
            change = fixed.error(_constants(values)) - fixed.error(changed)
            if abs(change) / _STEP > _SENSITIVE:
                found[run.family] = True
    return list(found)


def thinned(runs: Sequence[MeasuredRun], largest: int = 150) -> list[MeasuredRun]:
    """Returns at most `largest` runs of each family: all of a small family, every k-th of a
    large one.
    """
    families = [run.family for run in runs]
    found, seen = [], dict.fromkeys(families, 0)
    for run, family in zip(runs, families, strict=True):
        step = -(-families.count(family) // largest)
        if seen[family] % step == 0:
            found.append(run)
        seen[family] += 1
    return found


def write_fit(path: Path) -> None:
    """Fits the constants to all runs, then once more without each family (a fold). Writes the
    constants of all fits to a file like `data/constants.json`, and their covariances to the file
    `constant_covariances.json` beside it.
    """
    document = json.loads(json.dumps(constants_document()))
    runs = thinned(measured_runs())
    every = fit_constants(runs, document)
    folds = {
        family: fit_constants([run for run in runs if run.family != family], document)
        for family in dict.fromkeys(run.family for run in runs)
    }
    write_intervals(path, document, every, folds)


def write_intervals(
    path: Path, document: dict[str, Any], every: ConstantFit, folds: Mapping[str, ConstantFit]
) -> None:
    """Writes the two files of `write_fit` from the fit to all runs and the folds' fits."""
    runs = thinned(measured_runs())
    every, folds = _with_source_spread(every, folds)
    for name, entry in document["constants"].items():
        group, _, part = name.partition("/")
        if entry.get("width"):
            entry["value"] = _rounded(every.values[name])
            entry["fitted_to"] = informing_families(runs, every.values, name)
        elif group == "sigma":
            entry["value"] = _rounded(every.sigma[part], 3)
    document["folds"] = {
        family: {
            **{name: _rounded(fit.values[name]) for name in fit.covariance.names},
            **{f"sigma/{name}": _rounded(sigma, 3) for name, sigma in fit.sigma.items()},
        }
        for family, fit in folds.items()
    }
    known = {family: _fitted(fit) for family, fit in folds.items()}
    _add_quantiles(document, _fitted(every), known)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    covariances = {"all": every.covariance, **{name: fit.covariance for name, fit in folds.items()}}
    beside = path.with_name("constant_covariances.json")
    beside.write_text(covariances_text(covariances), encoding="utf-8")


def _with_source_spread(
    every: ConstantFit, folds: Mapping[str, ConstantFit]
) -> tuple[ConstantFit, dict[str, ConstantFit]]:
    """Returns the fits with the standard deviation of the source's part over all sources. That of
    a fold is fitted without the fold's family.
    """
    known = {family: _fitted(fit) for family, fit in folds.items()}
    sources = source_errors(_fitted(every), known)

    def spread(fit: ConstantFit, left_out: str | None) -> ConstantFit:
        sigma = fit_source_spread([each for each in sources if each.name != left_out])
        return replace(fit, sigma={**fit.sigma, "source": sigma})

    return spread(every, None), {family: spread(fit, family) for family, fit in folds.items()}


def _fitted(fit: ConstantFit) -> CalibratedConstants:
    sigma = {f"sigma/{name}": value for name, value in fit.sigma.items()}
    return _constants({**fit.values, **sigma}, fit.covariance)


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _rounded_up(value: float) -> float:
    """Returns the value with two decimals, rounded up: a smaller one would lose the run that the
    interval only just contains.
    """
    return ceil(value * 100) / 100


def _add_quantiles(
    document: dict[str, Any],
    every: CalibratedConstants,
    folds: Mapping[str, CalibratedConstants],
) -> None:
    """Adds half of the interval's width to the document: once from the errors of all families, and
    once for each fold from those of the other families.
    """
    runs = measured_runs()
    shipped = document["constants"]["interval_quantile"]
    shipped["value"] = _rounded_up(interval_quantile(runs, every, folds))
    for left_out, values in document["folds"].items():
        kept = [run for run in runs if run.family != left_out]
        values["interval_quantile"] = _rounded_up(interval_quantile(kept, every, folds))


if __name__ == "__main__":
    write_fit(Path(__file__).parents[1] / "data" / "constants.json")
