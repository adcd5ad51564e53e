"""The interval of the ratio of two layouts' times, held against published runs that differ only in
layout, micro batch and recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from math import log

import numpy as np
from layout_ranking import _job_key
from published_runs import predict_run, published_runs

from unisono.planner.constants.prediction_error import NORMAL_80


def test_ratios_of_layouts() -> None:
    """Tests that the 80 % interval holds 70 to 90 % of the pairs, as a mean over sources. It was
    not fitted to pairs: it follows from the parts of the errors of single runs.
    """
    groups = defaultdict(list)
    for run in published_runs():
        groups[_job_key(run)].append(run)
    inside = defaultdict(list)
    for runs in groups.values():
        steps = [predict_run(run) for run in runs]
        errors = [log(r.measured_s / s.step_s) for r, s in zip(runs, steps, strict=True)]
        for i, j in combinations(range(len(runs)), 2):
            if (runs[i].layout, runs[i].job) != (runs[j].layout, runs[j].job):
                width = NORMAL_80 * steps[i].ratio_deviation(steps[j])
                inside[runs[i].source].append(abs(errors[i] - errors[j]) < width)
    pairs = {source: len(each) for source, each in inside.items()}
    assert len(pairs) >= 10 and sum(pairs.values()) > 2000
    assert 0.7 < float(np.mean([np.mean(each) for each in inside.values()])) < 0.9
