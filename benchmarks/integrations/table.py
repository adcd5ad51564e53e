"""The table of docs/frameworks.md, from the results of `run.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frameworks import Framework

BEGIN, END = "<!-- integrations: begin -->", "<!-- integrations: end -->"
QUIET = 15.0
"""The table has the times of a framework if other programs used less than this percentage of the
CPUs before each of its runs."""
_HEADER = (
    "framework", "version", "ranks", "lines changed", "losses", "step over Gloo, ms",
    "step over Unisono, ms", "faster by", "does not work",
)  # fmt: skip


def write_table(page: Path, results: dict[str, Any], frameworks: Sequence[Framework]) -> None:
    """Writes the table into the page, between its two marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [_row(_HEADER), _row(["---"] * len(_HEADER))]
    for framework in frameworks:
        if framework.name in results:
            found = results[framework.name]
            rows += [
                _row(
                    (
                        framework.name,
                        found["version"],
                        ranks,
                        framework.lines_changed,
                        *_cells(framework, one, quiet=one.get("busy", QUIET) < QUIET),
                        _notes(framework, one),
                    )
                )
                for ranks, one in found["ranks"].items()
            ]
    page.write_text("\n".join([before + BEGIN, *rows, END]) + after)


def largest_difference(one: dict[str, Any]) -> float:
    """Returns the largest difference of a step's loss, relative to the loss over Gloo."""
    pairs = zip(one["torch"]["losses"], one["unisono"]["losses"], strict=True)
    return max(abs(gloo - ours) / max(abs(gloo), 1e-6) for gloo, ours in pairs)


def _cells(framework: Framework, one: dict[str, Any], *, quiet: bool) -> tuple[str, ...]:
    difference = largest_difference(one)
    losses = "equal" if difference == 0 else f"within {difference:.0e}"
    if framework.compares == "tokens":
        losses = "equal tokens" if difference == 0 else "other tokens"
    if not quiet:
        return losses, *["machine was busy"] * 2, ""
    gloo, ours = one["torch"]["step_ms"], one["unisono"]["step_ms"]
    ratio = statistics.median(gloo) / statistics.median(ours)
    return losses, _spread(gloo), _spread(ours), f"{ratio:.2f}"


def _notes(framework: Framework, one: dict[str, Any]) -> str:
    names = {"torch": "Gloo", "unisono": "Unisono"}
    crashes = [
        f"runs over {name} that crashed and were repeated: {one[served_by]['crashes']}"
        for served_by, name in names.items()
        if one[served_by].get("crashes", 0)
    ]
    return "; ".join([*([framework.note] if framework.note else []), *crashes])


def _spread(times_ms: Sequence[float]) -> str:
    tenths = statistics.quantiles(times_ms, n=10)
    return f"{statistics.median(times_ms):.2f} ({tenths[0]:.2f} to {tenths[-1]:.2f})"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
