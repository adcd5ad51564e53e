"""The part of the results that compares this source tree with an older one."""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import Any

from pages.target_rows import HEAD, target_row
from unisono.bench.sizes import format_size

UNCHANGED = 0.98


def render_trees(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `compare_revisions.py` as Markdown."""
    rows, ops = document["rows"], list(dict.fromkeys(row["op"] for row in document["rows"]))
    lines = [
        f"`python benchmarks/compare_revisions.py TREE` with the tree at {document['other']}:",
        f"collectives of both trees alternate, with {document['rounds']} rounds each. Ratios are",
        "the other tree's median time over this tree's: above 1, this tree is faster. Every",
        "result was verified.",
        "",
        *HEAD,
    ]
    counts = list(dict.fromkeys(row["ranks"] for row in rows))
    for count in counts:
        chosen = [row for row in rows if row["ranks"] == count]
        mean = round(geometric_mean(map(_ratio, chosen)), 3)
        name = (
            f"n = {count}: the other tree's time over this one's, geometric mean of "
            f"{len(chosen)} rows"
        )
        reached = mean >= UNCHANGED and not any(row["wrong"] for row in chosen)
        lines.append(target_row(name, f">= {UNCHANGED:g}", f"{mean:.3f}", reached))
    lines += ["", "| size | " + " | ".join(f"{op}, n = {n}" for n in counts for op in ops) + " |"]
    lines.append("|" + "---|" * (1 + len(counts) * len(ops)))
    for size in dict.fromkeys(row["size_bytes"] for row in rows):
        found = {(row["ranks"], row["op"]): row for row in rows if row["size_bytes"] == size}
        cells = [_cell(found[n, op]) for n in counts for op in ops]
        lines.append(f"| {format_size(size)} | " + " | ".join(cells) + " |")
    return lines


def _ratio(row: dict[str, Any]) -> float:
    times = row["times_s"]
    return float(median(times["other"]) / median(times["this"]))


def _cell(row: dict[str, Any]) -> str:
    return "**wrong**" if row["wrong"] else f"{_ratio(row):.2f}"
