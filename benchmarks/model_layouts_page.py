"""The part of benchmarks/RESULTS.md about models of transformers in layouts, from the JSON document
of `model_layouts.py`.
"""

from __future__ import annotations

from typing import Any

from target_rows import HEAD, target_row

BAR = 1e-10
_ERRORS = ("losses", "norms", "weights")


def render_model_layouts(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `model_layouts.py` as Markdown."""
    rows = document["rows"]
    trained = [row for row in rows if not row["refused"]]
    lines = [
        f"`python benchmarks/model_layouts.py` (transformers {document['transformers']}): tiny",
        "random models, 5 steps in float64 with AdamW and clipping, beside one process without",
        "Unisono. Largest errors of losses and norms of gradients (relative), and of exported",
        "weights.",
        "",
        *HEAD,
    ]
    for each in _ERRORS:
        worst = max((row[each] for row in trained), default=0.0)
        what = f"largest error of {each}, {len(trained)} trainings"
        lines.append(target_row(what, f"<= {BAR:.0e}", f"{worst:.1e}", worst <= BAR))
    lines += ["", "| model | layout | losses | norms | weights |", "|---|---|---|---|---|"]
    sentences: list[str] = []
    for row in rows:
        cells = [f"{row[each]:.1e}" for each in _ERRORS if not row["refused"]]
        if row["refused"]:
            if row["refused"] not in sentences:
                sentences.append(row["refused"])
            cells = [f"refused ({1 + sentences.index(row['refused'])})", "", ""]
        lines.append(f"| {row['model']} | {row['layout']} | {' | '.join(cells)} |")
    if sentences:
        lines += ["", "Refused on all ranks, in these words:", ""]
        lines += [f"{place}. {each}" for place, each in enumerate(sentences, 1)]
    return lines
