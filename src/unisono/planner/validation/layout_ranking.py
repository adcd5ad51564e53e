"""The order of layouts by predicted and by measured time, in runs that differ only in layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.planner.validation.ground_truth import MeasuredRun
from unisono.planner.validation.predicted_runs import grouped


def ranking(
    runs: Sequence[MeasuredRun], predicted_s: Sequence[float]
) -> tuple[float | None, float | None]:
    """Returns Kendall's tau (tau-a) and the mean regret over groups of runs.

    The runs of a group differ only in layout. A group has at least three runs of one model,
    cluster, sequence and batch. Without groups, both values are None.
    """
    pairs = list(zip(runs, predicted_s, strict=True))
    taus, regrets = [], []
    for _, group in grouped(pairs, lambda pair: _job_key(pair[0])):
        if len(group) < 3:
            continue
        measured = np.array([run.measured_s for run, _ in group])
        predicted = np.array([seconds for _, seconds in group])
        upper = np.triu_indices(len(group), 1)
        signs = np.sign(measured[:, None] - measured) * np.sign(predicted[:, None] - predicted)
        taus.append(float(np.mean(signs[upper])))
        regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
    if not taus:
        return None, None
    return float(np.mean(taus)), float(np.mean(regrets))


def _job_key(run: MeasuredRun) -> str:
    return repr((run.source, run.model, run.cluster, run.job.seq, run.job.global_batch, run.note))
