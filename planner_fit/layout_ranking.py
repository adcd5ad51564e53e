"""The order of layouts by predicted and by measured time, in runs that differ only in layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from published_runs import PublishedRun, grouped

_Floats = NDArray[np.float64]


def ranking(
    runs: Sequence[PublishedRun], predicted_s: Sequence[float]
) -> tuple[float | None, float | None]:
    """Returns the means of Kendall's tau and of the regret over groups of at least three runs of
    one source, model, cluster, sequence and batch. Without groups, both values are None.

    The layouts of a group include the micro batch and the recomputation. The regret is the measured
    time of the predicted best layout over the best measured time, minus 1. Pairs with equal
    measured times have no order, and do not count in tau.
    """
    taus, regrets = [], []
    pairs = list(zip(runs, predicted_s, strict=True))
    for _, group in grouped(pairs, lambda pair: _job_key(pair[0])):
        measured = np.array([run.measured_s for run, _ in group])
        predicted = np.array([seconds for _, seconds in group])
        if len(group) >= 3 and np.ptp(measured) > 0:
            order = np.sign(_differences(measured))
            agree = order * np.sign(_differences(predicted))
            taus.append(float(np.mean(agree[order != 0])))
            regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
    return (float(np.mean(taus)), float(np.mean(regrets))) if taus else (None, None)


def _differences(values: _Floats) -> _Floats:
    """Returns the differences of all pairs."""
    found: _Floats = (values[:, None] - values)[np.triu_indices(len(values), 1)]
    return found


def _job_key(run: PublishedRun) -> str:
    job = run.job.seq, run.job.global_batch
    return repr((run.table_source, run.model, run.cluster, *job, run.note))
