"""Predictions of published runs, with constants fitted with or without their families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from unisono.planner.constants.calibrated_constants import (
    CalibratedConstants,
    constants_document,
    constants_from,
)
from unisono.planner.constants.constant_covariance import constant_covariances
from unisono.planner.prediction import Prediction, predict
from unisono.planner.validation.ground_truth import MeasuredRun

_Item = TypeVar("_Item")


def predict_run(run: MeasuredRun, constants: CalibratedConstants) -> Prediction:
    """Returns the prediction of a measured run."""
    return predict(run.model, run.cluster, run.layout, run.job, constants=constants)


def fold_constants() -> Mapping[str, CalibratedConstants]:
    """Returns, for each family, the constants that were fitted without it."""
    document, covariances = constants_document(), constant_covariances()
    found = {}
    for family, values in document.get("folds", {}).items():
        entries = {
            name: {"value": values.get(name, entry["value"])}
            for name, entry in document["constants"].items()
        }
        found[family] = constants_from({"constants": entries}, covariances.get(family))
    return found


def row_name(run: MeasuredRun) -> str:
    """Returns the name of the run's row in the table of errors."""
    if run.family != "Megatron-Bridge":
        return run.family
    return f"{run.family}, {'experts' if run.model.experts else 'dense'}"


def grouped(items: Iterable[_Item], key: Callable[[_Item], str]) -> list[tuple[str, list[_Item]]]:
    """Groups items by key, in the order of their first members."""
    found: dict[str, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())
