"""Searches the layouts of Megatron-Bridge's published jobs: `python planner_fit/published_jobs.py`.

A job is a model, a cluster, a batch and a precision. For each job, prints the shortest published
step, its prediction, and the best layout that `search` finds, with marks for times outside of the
80 % intervals. Takes one to two minutes. The last lines have the spread of the runs of all sources
that state the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from published_runs import PublishedRun, grouped, predict_run, published_runs

from unisono.planner import Prediction, search

SOURCE = "Megatron-Bridge"


def job_key(run: PublishedRun) -> str:
    """Returns what the runs of a job have in common."""
    job = run.job.seq, run.job.global_batch, run.job.precision
    return f"{run.name}, {run.cluster.devices} {run.cluster.kind.name}, {job}"


def inside(run: PublishedRun, found: Prediction) -> bool:
    """Returns True if the interval of a prediction holds a run's time."""
    return found.low_s <= run.measured_s <= found.high_s


def equal_choices(runs: Sequence[PublishedRun]) -> str:
    """Returns the standard deviation of the logarithm of times inside of groups of runs of one
    source with the same job, layout and choices, which differ in their release.
    """

    def choices(run: PublishedRun) -> str:
        job = replace(run.job, software=None)
        return repr((run.source, run.model, run.cluster, run.layout, job))

    away, groups = [], 0
    for _, members in grouped(runs, choices):
        if len(members) > 1:
            logs = np.log([run.measured_s for run in members])
            away += list((logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1)))
            groups += 1
    return f"{np.sqrt(np.mean(np.square(away))):.1%} in {len(away)} runs of {groups} groups"


def main() -> None:
    """Prints a line for each job, how many intervals hold the shortest time, and the spreads."""
    runs = [run for run in published_runs() if run.source == SOURCE]
    jobs = grouped(runs, job_key)
    held = [0, 0]
    for name, members in jobs:
        best = min(members, key=lambda run: run.measured_s)
        job = replace(best.job, micro_batch=None, recompute=None)
        found = search(best.model, best.cluster, job, keep=1)[0].prediction
        texts = []
        for each, step in enumerate((predict_run(best), found)):
            known = inside(best, step)
            held[each] += known
            texts.append(f"{step.step_s:.2f} s{'' if known else ' *'} {step.layout.text()}")
        print(f"{name}: {best.measured_s:.2f} s; predicted {texts[0]}; found {texts[1]}")
    print(f"{len(jobs)} jobs; inside: published layout {held[0]}, found layout {held[1]}")
    for name, experts in (("dense models", False), ("mixtures", True)):
        those = [run for run in published_runs() if (run.model.experts > 0) == experts]
        print(f"equal choices, {name}: {equal_choices(those)}")


if __name__ == "__main__":
    main()
