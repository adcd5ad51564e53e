"""The constants that fit runs best, and those that fit the runs of all sources but one.

The fit minimises a robust loss of two kinds of logarithms: those of the measured over the predicted
time, for each run, and those of the value over the prior value, for each constant. A source of n
runs counts as n^(1/2) runs. The method is Gauss-Newton: the logarithms of times are almost linear
in those of the constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_runs import PublishedRun

from unisono.planner.constants.calibrated_constants import CalibratedConstants, constants_from
from unisono.planner.layout_evaluation import RunModel
from unisono.planner.step_times.kernel_times import KernelTimes

_DEVIATION = 0.08
"""Error of a step time that counts as much as a constant one width away from its prior."""
_ROUNDS = 8
_LARGEST_STEP = 0.5
_CLOSE = 0.01
"""Largest change of a constant's logarithm at which the fit ends."""
_CHANGE = 1.05
"""Factor of a constant, for the derivative of the step time by its logarithm."""
_Floats = NDArray[np.float64]


class FixedRun:
    """A run whose open choices, such as the micro batch, are made once."""

    def __init__(self, run: PublishedRun, constants: CalibratedConstants) -> None:
        self._run = run
        model = RunModel(run.model, run.cluster, run.job, constants)
        self._times = model.times
        self._choice = model.fastest(run.layout)[:3]

    def error(self, constants: CalibratedConstants) -> float:
        """Returns the logarithm of the measured over the predicted time."""
        kinds = self._times.with_constants(constants).step(*self._choice)
        return float(np.log(self._run.measured_s / sum(kinds.values())))

    def gradient(self, constants: CalibratedConstants, names: Sequence[str]) -> _Floats:
        """Returns the derivatives [names] of `-error` by the logarithms of the constants."""
        now = self.error(constants)
        kernels = vars(self._kernels(constants))
        found = []
        for name in names:
            changed = constants.scaled(name, _CHANGE)
            # Constants with a key, such as "tile_loss/hopper", only change times of kernels.
            same = "/" in name and vars(self._kernels(changed)) == kernels
            found.append(0.0 if same else now - self.error(changed))
        return np.array(found) / np.log(_CHANGE)

    def _kernels(self, constants: CalibratedConstants) -> KernelTimes:
        run = self._run
        return KernelTimes(run.cluster.kind, constants, precision=run.job.precision)


class ConstantFit:
    """A fit of the constants to runs. `document` is that of `constants.json`: it has the priors and
    their widths. Constants without a width are stated, not fitted. Some have a range, which they do
    not leave.
    """

    def __init__(self, runs: Sequence[PublishedRun], document: Mapping[str, Any]) -> None:
        entries = document["constants"]
        self.runs = list(runs)
        self.names = tuple(name for name, entry in entries.items() if entry.get("width"))
        self._priors = {
            name: entry["prior"] if entry.get("width") else entry.get("value", entry["prior"])
            for name, entry in entries.items()
        }
        self._widths = np.array([entries[name]["width"] for name in self.names])
        ends = [entries[name].get("range", (0.0, np.inf)) for name in self.names]
        priors = np.array([self._priors[name] for name in self.names])
        with np.errstate(divide="ignore"):
            self._lowest, self._highest = np.log(np.array(ends) / priors[:, None]).T
        self._sources = np.array([run.source for run in runs])
        counts = [np.sum(self._sources == source) for source in self._sources]
        self._weights = 2 * np.array(counts, np.float64) ** -0.25 / _DEVIATION
        self._offsets = np.zeros(len(self.names))
        for _ in range(_ROUNDS):
            self._linearise()
            found = self._solved(np.ones(len(self.runs), bool))
            step = np.clip(found - self._offsets, -_LARGEST_STEP, _LARGEST_STEP)
            self._offsets = self._offsets + step
            if np.abs(step).max() < _CLOSE:
                break
        self._linearise()

    def values(self, left_out: str | None = None) -> dict[str, float]:
        """Returns all constants by name; with `left_out`, those that fit the runs of all other
        sources.
        """
        offsets = self._offsets
        if left_out is not None:
            offsets = self._solved(self._sources != left_out)
        return self._moved(offsets)

    def constants(self, left_out: str | None = None) -> CalibratedConstants:
        """Returns `values` as constants."""
        return constants_of(self.values(left_out))

    def informing(self, name: str, smallest: float = 0.02) -> list[str]:
        """Returns the sources in which a change of the constant changes the time of some run by
        more than `smallest` times this change.
        """
        column = np.abs(self._gradients[:, self.names.index(name)])
        return list(dict.fromkeys(map(str, self._sources[column > smallest])))

    def _moved(self, offsets: _Floats) -> dict[str, float]:
        moved = zip(self.names, offsets, strict=True)
        return {
            **self._priors,
            **{name: self._priors[name] * float(np.exp(offset)) for name, offset in moved},
        }

    def _linearise(self) -> None:
        constants = constants_of(self._moved(self._offsets))
        fixed = [FixedRun(run, constants) for run in self.runs]
        self._errors = np.array([run.error(constants) for run in fixed])
        self._gradients = np.array([run.gradient(constants, self.names) for run in fixed])

    def _solved(self, kept: NDArray[np.bool_]) -> _Floats:
        """Returns the offsets that minimise the loss of the linearised errors of the kept runs."""
        weights = self._weights[kept]
        slopes = self._gradients[kept] * weights[:, None]
        targets = self._errors[kept] * weights + slopes @ self._offsets
        rows = np.vstack([slopes, np.diag(1 / self._widths)])
        wanted = np.concatenate([targets, np.zeros(len(self.names))])
        found, free = self._offsets, np.ones(len(self.names), bool)
        for _ in range(40):
            misfit = wanted - rows @ found
            roots = (1 + misfit**2) ** -0.25  # the weight of the loss sqrt(1 + x^2), its root
            part = (wanted - rows[:, ~free] @ found[~free]) * roots
            moved = found.copy()
            moved[free] = np.linalg.lstsq(rows[:, free] * roots[:, None], part, rcond=None)[0]
            found = np.clip(moved, self._lowest, self._highest)
            free &= found == moved  # a constant that reaches the end of its range stays there
        return found


def constants_of(values: Mapping[str, float]) -> CalibratedConstants:
    """Returns the constants with these values."""
    return constants_from({"constants": {name: {"value": value} for name, value in values.items()}})
