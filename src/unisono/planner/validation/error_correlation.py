"""The correlation of the errors of two runs that share the machine, the model or the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.run_similarity import RunSimilarity, similarity
from unisono.planner.prediction import predict
from unisono.planner.validation.ground_truth import MeasuredRun

_LARGEST = 150
"""Maximum number of runs of a family in the fit, which compares all pairs."""
_LIMIT = 3.0
"""Largest error that counts in the fit, in standard deviations of the prediction."""


class _RunError(NamedTuple):
    run: MeasuredRun
    like: RunSimilarity
    error: float


def shared_shares(
    runs: Sequence[MeasuredRun], folds: Mapping[str, CalibratedConstants]
) -> dict[str, float]:
    """Returns the shares of the error's variance that pairs of runs have in common.

    "machine": runs of one device and software; "model": in addition, of one model; "work": in
    addition, of the same work on each device. The errors are from predictions with constants that
    were fitted to other families. A share is the correlation of all pairs of its kind in a source,
    minus the previous shares. Families count equally (components of variance; Henderson, Biometrics
    9, 1953).
    """
    found = {kind: np.zeros(2) for kind in ("machine", "model", "work")}
    for family in dict.fromkeys(run.family for run in runs):
        members = [run for run in runs if run.family == family]
        for kind, products in _products(_errors(members, folds[family])).items():
            found[kind] += products
    whole = [product / square if square else 0.0 for product, square in found.values()]
    machine, model, work = np.maximum.accumulate(np.clip(whole, 0.0, 0.95))
    return {"machine": machine, "model": model - machine, "work": work - model}


def _errors(runs: Sequence[MeasuredRun], constants: CalibratedConstants) -> list[_RunError]:
    found = []
    for run in runs[:: -(-len(runs) // _LARGEST)]:
        step = predict(run.model, run.cluster, run.layout, run.job, constants=constants)
        error = float(np.log(run.measured_s / step.step_s)) / step.deviation
        like = similarity(run.model, run.cluster, run.layout, run.job)
        found.append(_RunError(run, like, float(np.clip(error, -_LIMIT, _LIMIT))))
    return found


def _products(errors: Sequence[_RunError]) -> dict[str, NDArray[np.float64]]:
    """Returns two means by kind of pair: of the product of both errors, and of their squares."""
    found: dict[str, list[tuple[float, float]]] = {}
    for a, b in combinations(errors, 2):
        for kind in _kinds(a, b):
            square = (a.error**2 + b.error**2) / 2
            found.setdefault(kind, []).append((a.error * b.error, square))
    return {kind: np.mean(pairs, axis=0) for kind, pairs in found.items() if len(pairs) > 3}


def _kinds(a: _RunError, b: _RunError) -> Iterator[str]:
    """Yields the kind of a pair of runs: what they have in common. Yields nothing if the runs are
    not comparable.
    """
    if a.run.source != b.run.source or a.run.note != b.run.note:
        return
    if a.like.machine != b.like.machine:
        return
    if a.like.model != b.like.model:
        yield "machine"
    else:
        yield "work" if a.like.work == b.like.work else "model"
