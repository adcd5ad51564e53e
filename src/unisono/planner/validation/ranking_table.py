"""The order of published layouts by source, as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.validation.ground_truth import MeasuredRun, measured_runs
from unisono.planner.validation.judged_runs import judged_runs
from unisono.planner.validation.layout_ranking import APART, VARIATION, RankedGroup, ranked_groups
from unisono.planner.validation.predicted_runs import fold_constants, grouped, predict_run

_FEW_GROUPS = 5
"""Largest number of groups of a source that have a line each."""

RANKING_COLUMNS = (
    "source",
    "groups",
    "runs",
    "Kendall's tau",
    f"pairs at least {APART:.0%} apart",
    "tau of these",
    f"limit of tau, steps vary by {VARIATION:.0%}",
    "regret",
)
"""Names of the columns of `ranking_cells`."""


def rankings() -> list[tuple[str, list[RankedGroup]]]:
    """Returns the groups of runs that differ only in layout, by source: of the fit's sources with
    held-out constants, and of the runs judged only with the shipped constants.
    """
    folds, every = fold_constants(), default_constants()
    sources: list[tuple[str, list[RankedGroup]]] = []
    for runs in (measured_runs(), judged_runs()):
        for source, members in grouped(runs, lambda run: run.source):
            seconds = [
                predict_run(run, every if runs is judged_runs() else folds[run.family]).step_s
                for run in _in_groups(members)
            ]
            groups = ranked_groups(_in_groups(members), seconds)
            if groups:
                sources.append((source, groups))
    return sources


def _in_groups(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Returns the runs of sources that have several layouts of one job."""
    return list(runs) if ranked_groups(runs, [1.0] * len(runs)) else []


def ranking_cells(sources: Sequence[tuple[str, list[RankedGroup]]]) -> list[tuple[str, ...]]:
    """Returns the cells of the table: a line for each source with the means over its groups, and,
    if a source has few groups, a line for each of them.
    """
    cells = []
    for source, groups in sources:
        if 1 < len(groups) <= _FEW_GROUPS:
            cells += [_cells(each.name, [each]) for each in groups]
            cells.append(_cells(f"{source}, mean", groups))
        else:
            cells.append(_cells(groups[0].name if len(groups) == 1 else source, groups))
    return cells


def _cells(name: str, groups: Sequence[RankedGroup]) -> tuple[str, ...]:
    clear = [each.clear_tau for each in groups if each.clear_tau is not None]
    return (
        name,
        str(len(groups)),
        str(sum(each.runs for each in groups)),
        f"{np.mean([each.tau for each in groups]):.2f}",
        f"{np.mean([each.clear_pairs for each in groups]):.0%}",
        f"{np.mean(clear):.2f}" if clear else "-",
        f"{np.mean([each.limit for each in groups]):.2f}",
        f"{np.mean([each.regret for each in groups]):.1%}",
    )


def ranking_markdown(sources: Sequence[tuple[str, list[RankedGroup]]]) -> str:
    """Returns the table in Markdown, as in `docs/planner.md`."""
    lines = [f"| {' | '.join(RANKING_COLUMNS)} |", "|---" * len(RANKING_COLUMNS) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in ranking_cells(sources)]
    return "\n".join(lines).replace("%", " %")
