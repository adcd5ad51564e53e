"""Tables of the planner's errors on published runs, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.planner.validation.error_rows import OWN_RUN_COUNTS, ErrorRow


def errors_markdown(rows: Sequence[ErrorRow]) -> str:
    """Returns the errors as a table in Markdown, as in `docs/planner.md`."""
    lines = [
        "| source | runs | fitted | held out | with one run | worst | Kendall's tau | regret |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tau = "-" if row.tau is None else f"{row.tau:.2f}"
        regret = "-" if row.regret is None else f"{row.regret:.1%}"
        own = row.with_own_runs(1)
        known = "-" if own is None else f"{own.error:.1%}"
        shares = [f"{row.fitted:.1%}", f"{row.held_out:.1%}", known, f"{row.worst:.0%}"]
        lines.append(_line(row.family, str(row.runs), *shares, tau, regret))
    return "\n".join(lines)


def intervals_markdown(rows: Sequence[ErrorRow]) -> str:
    """Returns the intervals as a table in Markdown, as in `docs/planner.md`. The last two lines are
    the means over all runs and over all sources.
    """
    lines = [
        "| source | runs | bias | spread | held out: in the interval | width | "
        "fitted: in the interval | width |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        biases = (f"{np.expm1(row.bias):+.0%}", f"{np.expm1(row.spread):.0%}")
        held = (f"{row.covered:.0%}", f"{row.width:.2f}")
        fitted = (f"{row.fitted_covered:.0%}", f"{row.fitted_width:.2f}")
        lines.append(_line(row.family, str(row.runs), *biases, *held, *fitted))
    runs = [row.runs for row in rows]
    for name, weights in (("all runs", runs), ("mean of the sources", None)):
        held_out, fitted_too = (
            f"{np.average([getattr(row, name) for row in rows], weights=weights):.0%}"
            for name in ("covered", "fitted_covered")
        )
        count = str(sum(runs)) if weights else "-"
        lines.append(_line(name, count, "-", "-", held_out, "-", fitted_too, "-"))
    return "\n".join(lines)


def own_runs_markdown(rows: Sequence[ErrorRow]) -> str:
    """Returns the errors after calibration as a table in Markdown, as in `docs/planner.md`. The
    last line is the mean over the sources that have enough runs.
    """
    lines = [
        "| source | error without own runs | with 1 | 2 | 3 | in the interval with 1 | 2 | 3 | "
        "width with 1 | 2 | 3 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = [row.with_own_runs(count) for count in OWN_RUN_COUNTS]
        blind = [f"{each.blind_error:.1%}" for each in own if each][:1]
        errors = ["-" if each is None else f"{each.error:.1%}" for each in own]
        covered = ["-" if each is None else f"{each.covered:.0%}" for each in own]
        widths = ["-" if each is None else f"{each.width:.2f}" for each in own]
        lines.append(_line(row.family, *(blind or ["-"]), *errors, *covered, *widths))
    every = [
        [each for each in (row.with_own_runs(count) for row in rows) if each is not None]
        for count in OWN_RUN_COUNTS
    ]
    blind = [f"{np.mean([each.blind_error for each in every[0]]):.1%}"]
    errors = [f"{np.mean([each.error for each in those]):.1%}" for those in every]
    covered = [f"{np.mean([each.covered for each in those]):.0%}" for those in every]
    lines.append(_line("mean of the sources", *blind, *errors, *covered, "-", "-", "-"))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('%', ' %') for cell in cells)} |"
