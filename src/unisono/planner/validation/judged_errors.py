"""Errors of the planner on runs that no constant is fitted to, by source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.validation.ground_truth import MeasuredRun
from unisono.planner.validation.judged_runs import judged_runs
from unisono.planner.validation.layout_ranking import ranking
from unisono.planner.validation.predicted_runs import predict_run


@dataclass(frozen=True, kw_only=True)
class JudgedErrors:
    """Errors on the runs of one source, with the shipped constants."""

    source: str
    runs: int
    error: float
    """Mean absolute error of the step time."""
    bias: float
    """Mean logarithm of measured over predicted time."""
    covered: float
    """Share of runs inside the 80 % interval."""
    fits: float
    """Share of runs that are predicted to fit in memory. All of them did fit."""
    memory: float | None
    """Mean absolute error of the memory of a device. None without published memory."""
    tau: float | None
    """Kendall's rank correlation in groups of runs that differ only in layout. None without such
    groups."""
    regret: float | None
    """Ratio of the measured time of the predicted best layout to the best measured time, minus
    1."""


def judged_errors(runs: Sequence[MeasuredRun] | None = None) -> list[JudgedErrors]:
    """Returns the errors by source, in the order of the sources.

    The default runs are `judged_runs()`.
    """
    given = judged_runs() if runs is None else runs
    sources = dict.fromkeys(run.source for run in given)
    return [_errors(source, [run for run in given if run.source == source]) for source in sources]


def _errors(source: str, runs: list[MeasuredRun]) -> JudgedErrors:
    predicted = [predict_run(run, default_constants()) for run in runs]
    seconds = [each.step_s for each in predicted]
    ratios = np.array(seconds) / [run.measured_s for run in runs]
    inside = [
        each.low_s <= run.measured_s <= each.high_s
        for run, each in zip(runs, predicted, strict=True)
    ]
    tau, regret = ranking(runs, seconds)
    memory = [
        abs(each.memory_bytes / run.memory_bytes - 1)
        for run, each in zip(runs, predicted, strict=True)
        if run.memory_bytes is not None
    ]
    return JudgedErrors(
        source=source,
        runs=len(runs),
        error=float(np.mean(np.abs(ratios - 1))),
        bias=float(-np.mean(np.log(ratios))),
        covered=float(np.mean(inside)),
        fits=float(np.mean([each.fits for each in predicted])),
        memory=float(np.mean(memory)) if memory else None,
        tau=tau,
        regret=regret,
    )


def judged_cells(rows: Sequence[JudgedErrors]) -> list[tuple[str, ...]]:
    """Returns the cells of the table of errors. The last two lines are the means over all runs and
    over all sources.
    """
    cells = [_cells(row.source, str(row.runs), row) for row in rows]
    runs = [row.runs for row in rows]
    for name, weights in (("all runs", runs), ("mean of the sources", None)):
        shares = {
            key: float(np.average([getattr(row, key) for row in rows], weights=weights))
            for key in ("error", "bias", "covered", "fits")
        }
        mean = JudgedErrors(
            source=name, runs=sum(runs), **shares, memory=None, tau=None, regret=None
        )
        cells.append(_cells(name, str(sum(runs)) if weights else "-", mean))
    return cells


def _cells(name: str, count: str, row: JudgedErrors) -> tuple[str, ...]:
    shares = (f"{row.error:.1%}", f"{np.expm1(row.bias):+.0%}", f"{row.covered:.0%}")
    memory = "-" if row.memory is None else f"{row.memory:.0%}"
    tau = "-" if row.tau is None else f"{row.tau:.2f}"
    regret = "-" if row.regret is None else f"{row.regret:.1%}"
    return (name, count, *shares, f"{row.fits:.0%}", memory, tau, regret)


JUDGED_COLUMNS = (
    "source",
    "runs",
    "error",
    "bias",
    "in the interval",
    "predicted to fit",
    "error of memory",
    "Kendall's tau",
    "regret",
)
"""Names of the columns of `judged_cells`."""


def judged_markdown(rows: Sequence[JudgedErrors]) -> str:
    """Returns the errors as a table in Markdown, as in `docs/planner.md`."""
    lines = [f"| {' | '.join(JUDGED_COLUMNS)} |", "|---" * len(JUDGED_COLUMNS) + "|"]
    for cells in judged_cells(rows):
        lines.append(f"| {' | '.join(cell.replace('%', ' %') for cell in cells)} |")
    return "\n".join(lines)
