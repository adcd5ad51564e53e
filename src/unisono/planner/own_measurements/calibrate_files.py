"""Makes a calibration from the user's files of measured collectives and step times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.own_measurements.calibration import Calibration, OwnRun
from unisono.planner.own_measurements.link_rates import (
    CollectiveTimes,
    fit_links,
    read_collectives,
)
from unisono.planner.own_measurements.measured_runs import MeasuredRun, read_own_runs
from unisono.planner.prediction import predict
from unisono.text_files import reading


def calibrate(
    files: Sequence[str | Path] = (),
    *,
    cluster: Cluster | None = None,
    runs: Sequence[MeasuredRun] = (),
    constants: CalibratedConstants | None = None,
) -> Calibration:
    """Returns a calibration from the user's own measurements.

    `files`: output of nccl-tests or JSON of `unisono bench` (collectives of `cluster`), or own step
    times (`read_own_runs`). `runs` are further own runs. Raises ValueError for a file of another
    kind, for collectives without `cluster`, and if there are no measurements.

    >>> from unisono import planner
    >>> own = planner.read_own_runs('''model,cluster,layout,seq,global_batch,micro_batch,step_s
    ... gpt3-1.7b,a100:8,"dp=8,zero=1",2048,64,4,1.1
    ... ''')
    >>> calibration = planner.calibrate(runs=own)
    >>> where, job = own[0].cluster, own[0].job
    >>> blind = planner.predict(own[0].model, where, own[0].layout, job)
    >>> known = planner.predict(own[0].model, where, own[0].layout, job, calibration=calibration)
    >>> known.high_s / known.low_s < blind.high_s / blind.low_s
    True
    """
    constants = constants or default_constants()
    collectives: list[CollectiveTimes] = []
    steps = list(runs)
    for path in map(Path, files):
        with reading(path) as text:
            if _has_collectives(text):
                collectives.append(read_collectives(text))
            else:
                steps += read_own_runs(text)
    if collectives and cluster is None:
        raise ValueError("collectives need the cluster that they were measured on: --cluster")
    if not collectives and not steps:
        raise ValueError("expected files of collectives or of own step times, found none")
    links = fit_links(collectives, cluster, constants) if cluster and collectives else []
    known = Calibration(links=tuple(links))
    return Calibration(
        runs=tuple(_own_run(run, known, constants) for run in steps), links=tuple(links)
    )


def _has_collectives(text: str) -> bool:
    start = text.lstrip()
    if not start.startswith("{"):
        return "_perf" in text or "# Rank" in text or "#  Rank" in text
    document = json.loads(text)
    return "rows" in document or "measured" in document


def _own_run(run: MeasuredRun, links: Calibration, constants: CalibratedConstants) -> OwnRun:
    found = predict(
        run.model, run.cluster, run.layout, run.job, constants=constants, calibration=links
    )
    return found.as_own_run(run.name, run.measured_s)
