"""Fits intervals at the shipped constants: `python -m unisono.planner.calibration.interval_fit`.

The constants keep their values. The command fits the parts of errors, the covariance of the
constants and the width of the interval, for all runs and for each fold, and writes them to
`data/constants.json` and `data/constant_covariances.json`. It needs SciPy and about two minutes.
`constant_fit` does the same after it has fitted the constants.
"""

from __future__ import annotations

import json
from pathlib import Path

from unisono.planner.calibration.constant_fit import (
    fit_intervals,
    thinned,
    write_intervals,
)
from unisono.planner.constants.calibrated_constants import constants_document
from unisono.planner.validation.ground_truth import measured_runs


def write_interval_fit(path: Path) -> None:
    """Fits the intervals and writes them to a file like `data/constants.json`, and the covariances
    to the file `constant_covariances.json` beside it.
    """
    document = json.loads(json.dumps(constants_document()))
    shipped = {name: entry["value"] for name, entry in document["constants"].items()}
    runs = thinned(measured_runs())
    folds = {}
    for family, values in document["folds"].items():
        kept = [run for run in runs if run.family != family]
        folds[family] = fit_intervals(kept, {**shipped, **values}, document)
    write_intervals(path, document, fit_intervals(runs, shipped, document), folds)


if __name__ == "__main__":
    write_interval_fit(Path(__file__).parents[1] / "data" / "constants.json")
