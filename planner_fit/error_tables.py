"""Tables of the planner's errors on published runs, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from left_out_errors import LeftOutSource
from own_run_errors import OwnRunErrors


def errors_markdown(
    sources: Sequence[LeftOutSource],
    fitted: Mapping[str, float],
    memory: Mapping[str, float | None],
) -> str:
    """Returns a table with a line for each source, and with the means over the sources. `fitted`
    has the mean absolute errors with constants that were fitted to all sources, and `memory` the
    errors of published peaks with constants of the other sources (`MemoryFit.error`).
    """
    rows = []
    for each in sources:
        (tau, regret), peak = each.ranking, memory[each.name]
        rows.append(
            (
                each.name,
                str(len(each.runs)),
                f"{fitted[each.name]:.1%}",
                f"{each.error:.1%}",
                f"{np.expm1(each.bias):+.0%}",
                f"{each.covered:.0%}",
                f"{each.width:.2f}",
                "-" if peak is None else f"{peak:.0%}",
                "-" if tau is None else f"{tau:.2f}",
                "-" if regret is None else f"{regret:.1%}",
            )
        )
    peaks = [each for each in memory.values() if each is not None]
    rows.append(
        (
            f"mean of the {len(sources)} sources",
            str(sum(len(each.runs) for each in sources)),
            f"{np.mean(list(fitted.values())):.1%}",
            f"{np.mean([each.error for each in sources]):.1%}",
            f"{np.expm1(np.mean([each.bias for each in sources])):+.0%}",
            f"{np.mean([each.covered for each in sources]):.0%}",
            "-",
            f"{np.mean(peaks):.1%}" if peaks else "-",
            "-",
            "-",
        )
    )
    columns = (
        *("source", "runs", "fitted", "left out", "bias", "in the interval", "width"),
        *("error of memory", "Kendall's tau", "regret"),
    )
    return _table(columns, rows)


def own_runs_markdown(rows: Mapping[str, Sequence[OwnRunErrors | None]]) -> str:
    """Returns a table of the errors after 1, 2, ... own runs, for the sources with enough runs. The
    last line is the mean over the sources that have enough runs for all columns.
    """
    known = {name: [each for each in row if each] for name, row in rows.items()}
    counts = max(len(row) for row in known.values())
    known = {name: row for name, row in known.items() if len(row) == counts}
    lines = [(name, *_own_cells(row)) for name, row in known.items()]
    every = zip(*known.values(), strict=True)
    means = [
        OwnRunErrors(
            runs=those[0].runs,
            error=float(np.mean([each.error for each in those])),
            blind_error=float(np.mean([each.blind_error for each in those])),
            covered=float(np.mean([each.covered for each in those])),
        )
        for those in every
    ]
    lines.append((f"mean of the {len(known)} sources", *_own_cells(means)))
    numbers = [str(i) for i in range(2, counts + 1)]
    columns = ("source", "without own runs", "with 1", *numbers)
    return _table((*columns, "in the interval with 1", *numbers), lines)


def _own_cells(row: Sequence[OwnRunErrors]) -> tuple[str, ...]:
    errors = (f"{each.error:.1%}" for each in row)
    return (f"{row[0].blind_error:.1%}", *errors, *(f"{each.covered:.0%}" for each in row))


def constants_markdown(document: Mapping[str, Any]) -> str:
    """Returns a table of the constants that are fitted."""
    rows = [
        (
            name,
            f"{entry['value']:.3g}",
            entry["unit"],
            f"{entry['prior']:.3g}",
            f"{width:.0%}",
            str(len(entry.get("fitted_to", []))),
        )
        for name, entry in document["constants"].items()
        if (width := entry.get("width") or entry.get("prior_width"))
    ]
    return _table(("constant", "value", "unit", "prior", "its width", "sources"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell.replace('%', ' %') for cell in row)} |" for row in rows]
    return "\n".join(lines)
