"""The order of layouts by predicted and by measured time, in runs that differ only in layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf

import numpy as np
from numpy.typing import NDArray

from unisono.planner.validation.ground_truth import MeasuredRun
from unisono.planner.validation.predicted_runs import grouped

APART = 0.05
"""Smallest difference of the logarithms of two measured times that counts as clear."""
VARIATION = 0.02
"""Standard deviation of the logarithm of a measured time, for the limit of tau. Repeated steps of
two clusters with equal hardware differ by 1 to 2 % (MLPerf v3.0)."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RankedGroup:
    """The order of runs that differ only in layout."""

    name: str
    runs: int
    tau: float
    """Kendall's rank correlation of predicted and measured times. Pairs with equal measured times
    have no order, and do not count."""
    clear_pairs: float
    """Share of the pairs whose measured times differ by at least `APART`."""
    clear_tau: float | None
    """Rank correlation of these pairs. None without such pairs."""
    limit: float
    """Expected rank correlation of a perfect planner, if each measured time varies by
    `VARIATION`."""
    regret: float
    """Ratio of the measured time of the predicted best layout to the best measured time, minus
    1."""


def ranked_groups(runs: Sequence[MeasuredRun], predicted_s: Sequence[float]) -> list[RankedGroup]:
    """Returns the groups of at least three runs of one source, model, cluster, sequence and batch.

    The layouts of a group include the micro batch and the recomputation.
    """
    pairs = list(zip(runs, predicted_s, strict=True))
    found = []
    for _, group in grouped(pairs, lambda pair: _job_key(pair[0])):
        measured = np.array([run.measured_s for run, _ in group])
        if len(group) >= 3 and np.ptp(measured) > 0:
            predicted = np.array([seconds for _, seconds in group])
            found.append(_ranked(_name(group[0][0]), measured, predicted))
    return found


def ranking(
    runs: Sequence[MeasuredRun], predicted_s: Sequence[float]
) -> tuple[float | None, float | None]:
    """Returns the means of Kendall's tau and of the regret over the groups of `ranked_groups`.

    Without groups, both values are None.
    """
    groups = ranked_groups(runs, predicted_s)
    if not groups:
        return None, None
    return (
        float(np.mean([each.tau for each in groups])),
        float(np.mean([each.regret for each in groups])),
    )


def tau_limit(measured_s: Sequence[float] | _Floats, variation: float) -> float:
    """Returns the expected rank correlation of the true with the measured times, if the logarithm
    of each measured time varies by the standard deviation `variation` around the true time.

    The true differences are taken to be the measured ones.

    >>> round(tau_limit([1.0, 2.0, 4.0], 0.02), 3), round(tau_limit([1.0, 1.01], 0.02), 3)
    (1.0, 0.275)
    """
    sizes = _pairs(np.log(measured_s))
    return float(np.mean([erf(abs(size) / (2 * variation)) for size in sizes]))


def _ranked(name: str, measured: _Floats, predicted: _Floats) -> RankedGroup:
    differences = _pairs(np.log(measured))
    agree = np.sign(differences) * np.sign(_pairs(np.log(predicted)))
    clear = np.abs(differences) >= APART
    return RankedGroup(
        name=name,
        runs=len(measured),
        tau=float(np.mean(agree[differences != 0])),
        clear_pairs=float(np.mean(clear)),
        clear_tau=float(np.mean(agree[clear])) if clear.any() else None,
        limit=tau_limit(measured, VARIATION),
        regret=float(measured[np.argmin(predicted)] / measured.min() - 1),
    )


def _pairs(logs: _Floats) -> _Floats:
    """Returns the differences of all pairs."""
    found: _Floats = (logs[:, None] - logs)[np.triu_indices(len(logs), 1)]
    return found


def _name(run: MeasuredRun) -> str:
    size = f"{run.model.parameters / 1e9:.1f}B"
    devices, batch = run.cluster.devices, run.job.global_batch
    return f"{run.source}: {size}, {devices} devices, batch {batch}"


def _job_key(run: MeasuredRun) -> str:
    return repr((run.source, run.model, run.cluster, run.job.seq, run.job.global_batch, run.note))
