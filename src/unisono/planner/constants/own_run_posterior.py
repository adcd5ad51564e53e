"""Conclusions from own runs on a device about the constants and the errors of other runs.

The errors of predictions have a joint distribution. Given the scales of two parts (`ErrorScale`),
it is normal: the covariance of two errors is the covariance of the constants times both
derivatives, plus the parts that the runs have in common. The user's own runs are known values of
this distribution. Their mean effect on the constants changes the constants, and their mean effect
on the common parts of the errors is a factor. Both are the best linear estimates (Henderson,
Biometrics 31, 1975), as a mean over the scales. Scales count by their probability after the own
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.error_distribution import (
    UNUSUAL_SOURCE,
    ErrorDistribution,
    blind_distribution,
    error_scales,
)
from unisono.planner.constants.own_run import OwnRun
from unisono.planner.constants.run_similarity import RunSimilarity
from unisono.planner.inputs.transformer import Transformer

_Floats = NDArray[np.float64]


class OwnRunPosterior:
    """The distribution of errors and constants, given own runs on one device.

    Without runs, it is the distribution of predictions that are not calibrated. `constants` are
    those that predicted the own runs.
    """

    def __init__(self, runs: Sequence[OwnRun], constants: CalibratedConstants) -> None:
        self.runs = tuple(runs)
        self._before = constants
        self._usual, sigma = constants.sigma, constants.sigma
        self._unusual = {**sigma, "source": UNUSUAL_SOURCE * sigma["source"]}
        self._single = np.array([(sigma["run"] * each.run) ** 2 for each in error_scales()])
        names = constants.covariance.names
        tables = [dict(run.derivatives) for run in runs]
        gradients = np.array([[table.get(name, 0.0) for name in names] for table in tables])
        self._factor = constants.covariance.matrix()  # [constants, constants]
        self._parts = gradients.reshape(len(runs), len(names)) @ self._factor
        errors = np.array([run.error for run in runs])
        self._inverses, self._weights = self._condition(errors)
        self._effects = self._inverses @ errors  # [scales, runs]
        self._mean = self._weights[:, None] * self._effects

    def _condition(self, errors: _Floats) -> tuple[_Floats, _Floats]:
        """Returns the inverse covariances [scales, runs, runs] of the own runs' errors, and the
        probability of each pair of scales after these errors.
        """
        count = len(self.runs)
        shared = [self._shared(run.like) for run in self.runs]  # each [scales, runs]
        common = np.reshape(np.array(shared), (count, len(error_scales()), count))
        alone = [run.like.single_variance(self._usual) for run in self.runs]
        matrices = common.transpose(1, 0, 2) + self._parts @ self._parts.T + np.diag(alone)
        matrices = matrices + np.multiply.outer(self._single, np.eye(count))
        inverses = np.linalg.inv(matrices)
        misfit = np.einsum("i,kij,j->k", errors, inverses, errors)
        logs = np.log([each.weight for each in error_scales()])
        logs -= (misfit + np.linalg.slogdet(matrices)[1]) / 2
        weights = np.exp(logs - logs.max())
        return inverses, weights / weights.sum()

    @cached_property
    def constants(self) -> CalibratedConstants:
        """The constants with the mean effect of the own runs."""
        changes = np.exp(self._factor @ (self._parts.T @ self._mean.sum(axis=0)))
        found = self._before
        for name, change in zip(found.covariance.names, changes, strict=True):
            found = found.scaled(name, float(change))
        return found

    def factor(self, like: RunSimilarity) -> float:
        """Returns the mean ratio of measured to predicted time of runs like this, after the
        constants were changed.
        """
        return float(np.exp(np.sum(self._shared(like) * self._mean)))

    def least_factor(self, model: Transformer, causes: tuple[str, ...]) -> float:
        """Returns the smallest factor that a layout of this model can have."""
        factors = [1.0]
        for machine in {run.like.machine for run in self.runs}:
            works = {run.like.work for run in self.runs if run.like.model == model}
            for work in (*works, ("another work",)):
                factors.append(self.factor(RunSimilarity(machine, model, work, causes)))
        return min(factors)

    def errors(self, like: RunSimilarity, gradient: _Floats) -> ErrorDistribution:
        """Returns the distribution of the error of a prediction with the changed constants and the
        factor.

        `gradient` has the derivatives of the logarithm of the step time by the logarithms of the
        constants that have a covariance, before the constants were changed.
        """
        parts = gradient @ self._factor
        without_source = like.shared_variance(like, {**self._usual, "source": 0.0})
        variance = without_source + like.single_variance(self._usual) + float(parts @ parts)
        blind = blind_distribution(variance, self._usual["source"], self._usual["run"])
        if not self.runs:
            return blind
        shared = self._shared(like) + self._parts @ parts  # [scales, runs]
        known = np.einsum("ki,kij,kj->k", shared, self._inverses, shared)
        means = np.sum(shared * self._effects, axis=1)
        return ErrorDistribution(
            weights=self._weights.tolist(),
            means=(means - self._weights @ means).tolist(),
            deviations=np.sqrt(np.square(blind.deviations) - known).tolist(),
        )

    def _shared(self, like: RunSimilarity) -> _Floats:
        """Returns the covariances [scales, runs] of an error with those of the own runs, without
        the part of wrong constants.
        """
        usual, unusual = (
            [run.like.shared_variance(like, sigma) for run in self.runs]
            for sigma in (self._usual, self._unusual)
        )
        # in the order of `error_scales`
        return np.repeat(np.array([usual, unusual]), len(error_scales()) // 2, axis=0)
