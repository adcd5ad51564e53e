"""The part of the results about models of transformers in layouts, from the JSON document
of `model_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pages.target_rows import HEAD, target_row
from unisono.planner import Layout

BAR = 1e-10
ERRORS = ("losses", "norms", "weights")
_FEW = 2
"""The ranks of the layouts that have a column each."""

Row = dict[str, Any]


def render_model_layouts(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `model_layouts.py` as Markdown."""
    rows: list[Row] = document["rows"]
    trained = [row for row in rows if not row["refused"]]
    sentences = list(dict.fromkeys(row["refused"] for row in rows if row["refused"]))
    lines = [
        f"`python benchmarks/model_layouts.py` (transformers {document['transformers']}): tiny",
        "random models in float64, 5 steps of AdamW with clipping, beside one process without",
        "Unisono. An error is the largest of those of losses and norms of gradients (relative),",
        "and of exported weights.",
        "",
        *HEAD,
    ]
    for each in ERRORS:
        worst = max((row[each] for row in trained), default=0.0)
        what = f"largest error of {each}, {len(trained)} trainings"
        lines.append(target_row(what, f"<= {BAR:.0e}", f"{worst:.1e}", worst <= BAR))
    few = [row for row in rows if Layout.parse(row["layout"]).devices == _FEW]
    lines += ["", *_by_layout(few, sentences), "", "| model | layout of 8 ranks | error |"]
    lines.append("|---|---|---|")
    for row in rows:
        if row not in few:
            lines.append(f"| {row['model']} | {row['layout']} | {_cell(row, sentences)} |")
    if sentences:
        lines += ["", "Refused on all ranks, in these words:", ""]
        lines += [f"{place}. {each}" for place, each in enumerate(sentences, 1)]
    return lines


def _by_layout(rows: Sequence[Row], sentences: Sequence[str]) -> Iterator[str]:
    """Yields a table with a row for each model and a column for each layout."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    cells = {(row["model"], row["layout"]): _cell(row, sentences) for row in rows}
    yield f"| model | {' | '.join(layouts)} |"
    yield "|---" * (1 + len(layouts)) + "|"
    for model in dict.fromkeys(row["model"] for row in rows):
        yield f"| {model} | {' | '.join(cells.get((model, each), '') for each in layouts)} |"


def _cell(row: Row, sentences: Sequence[str]) -> str:
    if row["refused"]:
        return f"refused ({1 + sentences.index(row['refused'])})"
    return f"{max(row[each] for each in ERRORS):.1e}"
