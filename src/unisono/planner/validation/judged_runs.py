"""Published runs that judge the planner: no constant is fitted to them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from unisono.planner.data_files import data_text
from unisono.planner.validation.ground_truth import MeasuredRun, run_of_row

_MODEL_SIZES = ("shared_experts", "dense_layers", "query_rank", "kv_rank", "rope_dim")


@cache
def judged_runs() -> tuple[MeasuredRun, ...]:
    """Returns the runs that no constant is fitted to (`data/judged_runs.csv` names their sources).

    >>> from unisono.planner.validation.ground_truth import measured_runs
    >>> set(judged_runs()) & set(measured_runs())
    set()
    """
    lines = [line for line in data_text("judged_runs.csv").splitlines() if line[:1] != "#"]
    return tuple(_run_of_row(row) for row in csv.DictReader(lines))


def _run_of_row(row: Mapping[str, str]) -> MeasuredRun:
    """Returns the run of a row with the columns of `training_runs.csv` and of this table."""
    run = run_of_row(row)
    sizes: dict[str, Any] = {name: int(row[name]) for name in _MODEL_SIZES if row[name]}
    network = row["network_Gbps"]
    return replace(
        run,
        model=replace(run.model, **sizes),
        cluster=replace(run.cluster, network_Bps=float(network) * 1e9 / 8 if network else None),
        layout=replace(
            run.layout,
            dp_replicate=int(row["dp_replicate"] or 1),
            schedule=row["schedule"] or "1f1b",
        ),
        job=replace(run.job, software=row["software"] or None),
    )
