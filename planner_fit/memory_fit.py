"""The constants of memory, fitted to published peaks, and the errors of peaks on sources that were
left out of this fit.

Sources print one of three measures. `_MEASURES` has those that name theirs, or whose program does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_runs import PublishedRun, predict_run

from unisono.planner import Prediction
from unisono.planner.constants.calibrated_constants import CalibratedConstants

_MEASURES = {
    "torchtitan": "reserved",
    "nanotron old_bench": "reserved",
    "nanotron ultrascale summary": "reserved",
    "KempnerForge": "allocated",
    "arXiv 2401.10241 table 4": "allocated",
}
"""allocated: live tensors (`max_memory_allocated`). reserved: of the allocator
(`max_memory_reserved`). All other sources print what the driver shows, or do not say: reserved, the
context and the communicators."""
_NAMES = ("fragmentation", "communicator_bytes")
_STEPS = 9
"""Values that are tried between the ends of the range of each constant."""
_DEVIATION = 0.1
"""Error of a peak that counts as much as a constant one width away from its prior."""
_Floats = NDArray[np.float64]


def measured_bytes(run: PublishedRun, prediction: Prediction) -> float:
    """Returns the bytes that the run's source would print for a prediction."""
    measure = _MEASURES.get(run.source, "driver")
    if measure == "allocated":
        return prediction.live_bytes
    outside = prediction.memory["context and communicators"][0]
    return prediction.memory_bytes - (outside if measure == "reserved" else 0.0)


class MemoryFit:
    """The two constants of memory that fit the published peaks best. `document` is that of
    `constants.json`: it has their priors and ranges.
    """

    def __init__(
        self,
        runs: Sequence[PublishedRun],
        constants: CalibratedConstants,
        document: Mapping[str, Any],
    ) -> None:
        self._runs = [run for run in runs if run.memory_bytes]
        entries = [document["constants"][name] for name in _NAMES]
        grids = [np.linspace(*entry["range"], _STEPS) for entry in entries]
        self._tried = [tuple(map(float, values)) for values in product(*grids)]
        self._away = np.array(
            [
                [np.log(value / each["prior"]) / each["prior_width"] for value, each in pairs]
                for pairs in (zip(values, entries, strict=True) for values in self._tried)
            ]
        )
        self._sources = np.array([run.source for run in self._runs])
        self._errors = np.array([self._run_errors(run, constants) for run in self._runs])

    @property
    def sources(self) -> list[str]:
        """Sources with published peaks."""
        return list(dict.fromkeys(map(str, self._sources)))

    def values(self, left_out: str | None = None) -> dict[str, float]:
        """Returns the constants by name; with `left_out`, those that fit all other sources."""
        return dict(zip(_NAMES, self._tried[self._best(left_out)], strict=True))

    def error(self, source: str) -> float | None:
        """Returns the mean absolute error of the peaks of a source, with constants of the others.
        None without published peaks.
        """
        kept = self._sources == source
        if not kept.any():
            return None
        return float(np.mean(np.abs(np.expm1(self._errors[kept, self._best(source)]))))

    def _run_errors(self, run: PublishedRun, constants: CalibratedConstants) -> list[float]:
        """Returns the logarithms of predicted over measured bytes for all tried constants."""
        assert run.memory_bytes
        found = []
        for values in self._tried:
            tried = constants.changed(**dict(zip(_NAMES, values, strict=True)))
            ratio = measured_bytes(run, predict_run(run, tried)) / run.memory_bytes
            found.append(float(np.log(ratio)))
        return found

    def _best(self, left_out: str | None) -> int:
        """Returns the index of the tried constants with the smallest loss. The loss is that of
        `ConstantFit`.
        """
        loss: _Floats = np.sqrt(1 + self._away**2).sum(axis=1)
        for source in self.sources:
            errors = self._errors[self._sources == source]
            if source != left_out:
                each = np.sqrt(1 + (errors / _DEVIATION) ** 2).mean(axis=0)
                loss = loss + each * len(errors) ** 0.5
        return int(np.argmin(loss))
