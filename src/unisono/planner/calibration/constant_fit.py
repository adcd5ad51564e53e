"""Fits the constants to measured runs: `python -m unisono.planner.calibration.constant_fit`.

The fit minimises a robust loss of two kinds of logarithms: that of the predicted over the measured
time, for each run, and that of the value over the prior value, for each constant. It needs SciPy.
Runs are weighted so that a family of n runs counts as n^(1/2). For cross-validation, the constants
are also fitted without each family (a fold). The errors of all fits give the widths of the 80 %
interval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.planner.calibration.interval_fit import interval_widths
from unisono.planner.constants.calibrated_constants import (
    CalibratedConstants,
    constants_document,
    constants_from,
)
from unisono.planner.run_choices import RunModel
from unisono.planner.validation.error_correlation import shared_shares
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


class _FixedRun:
    """A run whose open choices, such as the micro batch, are made once, with the first set of
    constants.
    """

    def __init__(self, run: MeasuredRun, constants: CalibratedConstants) -> None:
        self._run = run
        model = RunModel(run.model, run.cluster, run.job, constants)
        self._layout, self._micro_batch, self._recompute, _ = model.fastest(run.layout)

    def log_error(self, constants: CalibratedConstants) -> float:
        run = self._run
        model = RunModel(run.model, run.cluster, run.job, constants)
        kinds = model.times.step(self._layout, self._micro_batch, self._recompute)
        return float(np.log(sum(kinds.values()) / run.measured_s))


def fit_constants(
    runs: Sequence[MeasuredRun], document: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Returns the constants fitted to runs, by name. `document` has the priors and their widths.

    Raises ImportError without SciPy.
    """
    document = document or constants_document()
    priors = {name: entry["prior"] for name, entry in document["constants"].items()}
    names = [name for name, entry in document["constants"].items() if entry.get("width")]
    widths = np.array([document["constants"][name]["width"] for name in names])
    values = dict(priors)
    for _ in range(_ROUNDS):
        values = _fit_once(runs, names, widths, priors, values)
    return values


def _fit_once(
    runs: Sequence[MeasuredRun],
    names: Sequence[str],
    widths: _Floats,
    priors: Mapping[str, float],
    start: Mapping[str, float],
) -> dict[str, float]:
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    fixed = [_FixedRun(run, _constants(start)) for run in runs]
    weights = _weights(runs) / _DEVIATION

    def residuals(offsets: _Floats) -> _Floats:
        constants = _constants(_moved(priors, names, offsets))
        errors = np.array([run.log_error(constants) for run in fixed])
        return np.concatenate([errors * weights, offsets / widths])

    begin = np.array([np.log(start[name] / priors[name]) for name in names])
    found = least_squares(residuals, begin, loss="soft_l1", max_nfev=6, diff_step=_STEP)
    return _moved(priors, names, found.x)


def _moved(priors: Mapping[str, float], names: Sequence[str], offsets: _Floats) -> dict[str, float]:
    moved = {name: float(priors[name] * np.exp(x)) for name, x in zip(names, offsets, strict=True)}
    return {**priors, **moved}


def _constants(values: Mapping[str, float]) -> CalibratedConstants:
    return constants_from({"constants": {name: {"value": v} for name, v in values.items()}})


def _weights(runs: Sequence[MeasuredRun]) -> _Floats:
    families = [run.family for run in runs]
    return np.array([2 * families.count(family) ** -0.25 for family in families])


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
            change = fixed.log_error(changed) - fixed.log_error(_constants(values))
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
    constants of all fits to a file like `data/constants.json`.
    """
    document = json.loads(json.dumps(constants_document()))
    runs = thinned(measured_runs())
    values = fit_constants(runs, document)
    for name, entry in document["constants"].items():
        if entry.get("width"):
            entry["value"] = float(f"{values[name]:.4g}")
            entry["fitted_to"] = informing_families(runs, values, name)
    document["folds"], folds = {}, {}
    for family in dict.fromkeys(run.family for run in runs):
        rest = [run for run in runs if run.family != family]
        fold = fit_constants(rest, document)
        folds[family] = _constants(fold)
        document["folds"][family] = {
            name: float(f"{fold[name]:.4g}")
            for name, entry in document["constants"].items()
            if entry.get("width")
        }
    _add_shared_shares(document, folds)
    for name, width in interval_widths(measured_runs(), _constants(values), folds).items():
        document["constants"][f"sigma/{name}"]["value"] = float(f"{width:.3g}")
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _add_shared_shares(document: dict[str, Any], folds: Mapping[str, CalibratedConstants]) -> None:
    """Adds to the document the shares of error variance that similar runs have in common. They are
    computed once from all runs, and once for each fold from the runs of the other families.
    """
    runs = measured_runs()
    for name, share in shared_shares(runs, folds).items():
        entry = document["constants"][f"shared/{name}"]
        entry["value"] = entry["prior"] = float(f"{share:.2g}")
        entry["fitted_to"] = list(folds)
    for family in folds:
        rest = [run for run in runs if run.family != family]
        document["folds"][family].update(
            {f"shared/{name}": float(f"{v:.2g}") for name, v in shared_shares(rest, folds).items()}
        )


if __name__ == "__main__":
    write_fit(Path(__file__).parents[1] / "data" / "constants.json")
