"""Fits the planner's constants to all published runs: `python planner_fit/fit.py`.

Writes `src/unisono/planner/data/constants.json`, and the tables of errors into `docs/planner.md`.
Takes two to five minutes. With `--tables`, only the tables are written, and the constants of the
file stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from constant_fit import ConstantFit
from error_tables import constants_markdown, errors_markdown, own_runs_markdown
from interval_fit import fit_parts
from left_out_errors import LeftOutSource, left_out_sources, source_errors
from memory_fit import MemoryFit
from own_run_errors import own_run_errors
from published_runs import grouped, predict_run, published_runs, thinned

from unisono.planner.constants.calibrated_constants import CalibratedConstants, constants_from

ROOT = Path(__file__).parents[1]
CONSTANTS = ROOT / "src" / "unisono" / "planner" / "data" / "constants.json"
PAGE = ROOT / "docs" / "planner.md"
LARGEST = 40
"""Largest number of runs of a source in the fit."""


def fitted_document(
    fit: ConstantFit,
    memory: MemoryFit,
    sources: Sequence[LeftOutSource],
    document: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the document of `constants.json` with the values of the fit."""
    found: dict[str, Any] = json.loads(json.dumps(document))
    values, peaks = fit.values(), memory.values()
    members = [(each.name, list(each.runs)) for each in sources]
    sigma = fit_parts(source_errors(members, {each.name: each.constants for each in sources}))
    for name, entry in found["constants"].items():
        group, _, part = name.partition("/")
        if group == "sigma":
            entry["value"] = float(f"{sigma[part]:.3g}")
        elif name in peaks:
            entry["value"] = float(f"{peaks[name]:.4g}")
            entry["fitted_to"] = memory.sources
        elif entry.get("width"):
            entry["value"] = float(f"{values[name]:.4g}")
            entry["fitted_to"] = fit.informing(name)
    return found


def write_tables(
    page: Path,
    document: Mapping[str, Any],
    constants: CalibratedConstants,
    sources: Sequence[LeftOutSource],
    memory: MemoryFit,
) -> None:
    """Replaces the tables between the marks `<!-- table: NAME -->` and `<!-- end -->`."""
    fitted = {}
    for name, members in grouped(published_runs(), lambda run: run.source):
        ratios = [predict_run(run, constants).step_s / run.measured_s for run in members]
        fitted[name] = float(np.mean(np.abs(np.array(ratios) - 1)))
    peaks = {each.name: memory.error(each.name) for each in sources}
    own = {each.name: [own_run_errors(each, count) for count in (1, 2, 3)] for each in sources}
    text = page.read_text(encoding="utf-8")
    for name, table in (
        ("errors", errors_markdown(sources, fitted, peaks)),
        ("own runs", own_runs_markdown(own)),
        ("constants", constants_markdown(document)),
    ):
        text = replace_table(text, name, table)
    page.write_text(text, encoding="utf-8")


def replace_table(text: str, name: str, table: str) -> str:
    """Returns the page's text with another table between its two marks. Raises ValueError."""
    start = f"<!-- table: {name} -->\n"
    before, _, rest = text.partition(start)
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"the page lacks {start.strip()} and <!-- end -->")
    return f"{before}{start}{table}\n{end}{after}"


def main() -> None:
    """Fits, and writes both files."""
    document = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    runs = published_runs()
    fit = ConstantFit(thinned(runs, LARGEST), document)
    memory = MemoryFit(runs, fit.constants(), document)
    sources = left_out_sources(fit, runs)
    if "--tables" not in sys.argv[1:]:
        document = fitted_document(fit, memory, sources, document)
        CONSTANTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_tables(PAGE, document, constants_from(document), sources, memory)
    errors = [each.error for each in sources]
    covered = [each.covered for each in sources]
    peaks = [peak for each in sources if (peak := memory.error(each.name)) is not None]
    print(
        f"left out: {np.mean(errors):.1%} over {len(sources)} sources, in the interval "
        f"{np.mean(covered):.0%}; memory {np.mean(peaks):.1%} over {len(peaks)} sources"
    )


if __name__ == "__main__":
    main()
